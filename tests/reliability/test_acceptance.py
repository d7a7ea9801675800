"""Updates that are scored: an undone one leaves the run bit for bit as if it had not been made."""

STEPS = 7
KINDS = ("actor/", "critic/", "response_length/", "rollout_corr/", "training/", "lr_sched/", "precision/", "val/")


def acceptance(tolerance: float) -> str:
    return f"acceptance={{tolerance: {tolerance}, prompts: 3, num_samples: 4}}"


def without_scores(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("acceptance/")} for row in rows]


def test_scoring_leaves_no_trace(runs, whole):
    runs.train("scored", acceptance(1e9))
    rows = runs.rows("scored")
    assert all(row["acceptance/kept"] == 1.0 for row in rows[:STEPS])
    assert without_scores(rows) == whole
    assert runs.tensors("scored") == runs.tensors("whole") != {}


def test_an_undone_update_has_not_been_made(runs):
    """Against a run that never made the updates which the other undid. Of either sign are gaps of made-up responses."""
    runs.train("judged", acceptance(0.0))
    judged = runs.rows("judged")[:STEPS]
    undone = [row["step"] for row in judged if not row["acceptance/kept"]]
    assert 0 < len(undone) < STEPS
    assert all((row["acceptance/gap"] < 0) == (row["step"] in undone) for row in judged)
    runs.train("skipped", acceptance(1e9), skipped_updates=tuple(undone))
    for row, other in zip(judged, runs.rows("skipped")[:STEPS], strict=True):
        names = [name for name in row if name.startswith(KINDS) and (row["step"] not in undone or name in other)]
        assert len(names) > 10
        assert {name: row[name] for name in names} == {name: other[name] for name in names}, row["step"]
    assert runs.tensors("judged") == runs.tensors("skipped") != {}
    assert runs.log("judged").count("update undone, gap") == len(undone)
