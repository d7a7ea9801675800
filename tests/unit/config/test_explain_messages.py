"""Every key of the schema, mistyped, of another type, out of range and null: what the message says.

It names the full path, the keys or values allowed there (of that variant, where there are several) and the file and
line that set the value, though another recipe extends that file.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.base import LookedUp, NullIsZero, Section, Short, ShortList
from megatron_rl.config.explain import sections_of, tag_key, tag_of
from megatron_rl.errors import InputError
from tests.support.small_recipe import SOUND


@dataclass(frozen=True)
class Key:
    path: str
    section: type[BaseModel]
    field: FieldInfo
    values: Callable[[dict], dict]  # what a recipe says to have these keys in the section

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def keys(section: type[BaseModel], path: str, values: Callable[[dict], dict]) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        here = f"{path}.{name}".lstrip(".")
        yield Key(here, section, field, values)
        variants = sections_of(field.annotation)
        tag = tag_key(variants)
        for variant in variants:
            own = {tag: tag_of(variant, tag)} if tag else {}
            if get_origin(field.annotation) is list:
                yield from keys(variant, f"{here}.0", lambda v, n=name, o=own: values({n: [{**o, **v}]}))
            else:
                yield from keys(variant, here, lambda v, n=name, o=own: values({n: {**o, **v}}))


KEYS = list(keys(Recipe, "", lambda values: values))
IDS = [f"{key.section.__name__}.{key.name}" for key in KEYS]


def test_every_section_of_the_schema_is_here():
    todo, sections = [Section], set()
    while todo:
        todo += (section := todo.pop()).__subclasses__()
        if (
            section.__module__.startswith("megatron_rl.config.")
            and not section.__subclasses__()
            and section.model_fields
        ):
            sections.add(section)
    assert {key.section for key in KEYS} == sections
    assert len(KEYS) > 200


def line_about(message: str, path: str, tmp_path: Path) -> str:
    """The line of ``message`` that begins with ``path``; the file and line that it names must hold the key."""
    text = [line for line in message.splitlines() if re.match(rf"  {re.escape(path)}(?![\w])[.\w]*: ", line)]
    assert text, f"{path} is not named in:\n{message}"
    place = re.search(rf"\(set in {re.escape(str(tmp_path / 'base.yaml'))}:(\d+)\)$", text[0])
    assert place, text[0]
    written = (tmp_path / "base.yaml").read_text().splitlines()[int(place[1]) - 1]
    if written.strip().startswith("- ") and text[0].partition(": ")[0].rpartition(".")[2].isdigit():
        return text[0]  # an item of a list, on a line of its own
    last = [part for part in path.split(".") if not part.isdigit()][-1]
    assert f"{last}:" in written, (text[0], written)
    return text[0]


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_a_typo(key, message, tmp_path):
    wrong = f"{key.name}x"
    line = line_about(message(key.values({wrong: 1})), key.path + "x", tmp_path)
    assert "unknown key" in line
    assert f"did you mean '{key.name}'?" in line
    assert f"allowed: {', '.join(key.section.model_fields)} (set" in line
    if tag := next((tag_of(key.section, name) for name in ("name", "mode") if tag_of(key.section, name)), None):
        assert f": {tag};" in line


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_another_type(key, message, tmp_path):
    kinds = all_kinds(key.field.annotation)
    wrong: list[Any] = [[[]]] if not kinds & {list, dict} else [7]
    if str not in kinds and Path not in kinds:
        wrong += [] if any(isinstance(mark, Short | ShortList) for mark in key.field.metadata) else ["text", "1"]
    if bool not in kinds:
        wrong.append(True)
    elif not kinds & {int, float}:
        wrong.append(1)
    for value in wrong:
        line = line_about(message(key.values({key.name: value})), key.path, tmp_path)
        assert "found " in line
        if allowed := names_allowed(key.field):
            assert all(name in line for name in allowed), line


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_out_of_range(key, message, tmp_path):
    for value, said in outside(key.field):
        line = line_about(message(key.values({key.name: value})), key.path, tmp_path)
        assert all(text in line for text in said), line


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_null(key, message, tmp_path):
    text = message(key.values({key.name: None}))
    if takes_null(key.field):
        assert f"{key.path}: found null" not in text
    elif is_tag(key):
        line_about(text, key.path, tmp_path)
    else:
        assert f"{key.path}: found null" in line_about(text, key.path, tmp_path)


def is_tag(key: Key) -> bool:
    return tag_of(key.section, key.name) is not None


def all_kinds(annotation: Any) -> set[Any]:
    """Types that a value may have; sections count as mappings."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) in (list, tuple, dict):
        return {list if get_origin(annotation) is tuple else get_origin(annotation)}
    if get_args(annotation):
        return set().union(*(all_kinds(argument) for argument in get_args(annotation) if argument is not None))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {dict}
    return {annotation}


def names_allowed(field: FieldInfo) -> list[str]:
    variants = sections_of(field.annotation)
    if tag := tag_key(variants):
        return [str(tag_of(variant, tag)) for variant in variants]
    if variants:
        by_text = any(isinstance(mark, ShortList) for mark in field.metadata)
        return list(variants[0].model_fields) if by_text or get_origin(field.annotation) is not list else []
    return [str(value) for value in literals(field.annotation)] if get_origin(field.annotation) is not list else []


def literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for argument in get_args(annotation) for value in literals(argument)]


def takes_null(field: FieldInfo) -> bool:
    by_mark = any(isinstance(mark, NullIsZero | ShortList) or getattr(mark, "or_null", 0) for mark in field.metadata)
    return by_mark or type(None) in get_args(field.annotation) or field.annotation is Any


def constraints(field: FieldInfo) -> Iterator[Any]:
    """Bounds of a field, and of the one type beside null of an optional one."""
    todo: list[Any] = [*field.metadata, *get_args(field.annotation)]
    while todo:
        mark = todo.pop()
        todo += getattr(mark, "__metadata__", ())
        if isinstance(mark, FieldInfo):
            todo += mark.metadata
        yield mark


def outside(field: FieldInfo) -> Iterator[tuple[Any, list[str]]]:
    lower, upper = [], []
    for mark in constraints(field):
        match mark:
            case annotated_types.Gt(gt=bound):
                lower.append((bound, f"greater than {bound:g}"))
            case annotated_types.Ge(ge=bound):
                lower.append((bound - 0.5, f"greater than or equal to {bound:g}"))
            case annotated_types.Lt(lt=bound):
                upper.append((bound, f"less than {bound:g}"))
            case annotated_types.Le(le=bound):
                upper.append((bound + 0.5, f"less than or equal to {bound:g}"))
    for bounds, strictest, step in ((lower, max, -1), (upper, min, 1)):
        if bounds:
            value, said = strictest(bounds)
            value = value + step if isinstance(value, int) else value
            yield (value if float in all_kinds(field.annotation) else int(value // 1)), ["found ", said]
    kinds = all_kinds(field.annotation)
    if kinds & {float, int} and not kinds & {str, list}:
        for value in (float("inf"), float("-inf"), float("nan")):
            yield value, ["found ", "finite number" if float in kinds else "integer"]
        yield 2.5 if float not in kinds else "1_0", ["found "]
        if not upper:
            yield 2**33, ["found 8589934592", "at most 4,294,967,296"]
    if Path in kinds or (dict not in kinds and any(isinstance(mark, LookedUp) for mark in field.metadata)):
        for value in ("", "ü" * 128, "a/" * 2048):
            yield value, ["found ", "each name in it up to 255"]
    if options := literals(field.annotation):
        wrong = f"{options[0]}x"
        yield [wrong] if list in kinds else wrong, [f"found '{wrong}'", *(str(option) for option in options)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("objective.correction=[{mode: tis, caps: 2}]", "objective.correction.0.caps: unknown key for mode: tis; did"),
        (
            "objective.correction=[{mode: tis, caps: 2}]",
            "did you mean 'cap'? allowed: normalize, mode, level, cap, lower (set in --set",
        ),
        ("learner.lr=1e-6", "learner.lr: unknown key; did you mean 'learner.optimizer.lr'? allowed: dtype, "),
        ("objective.policy_term=gsop", "objective.policy_term.name: found 'gsop'; allowed: ppo_clip, gspo, "),
        ("objective.policy_term={clip_low: 1}", "objective.policy_term.name: missing; allowed: ppo_clip, gspo, "),
        ("objective.correction=[tiss]", "objective.correction.0.mode: found 'tiss'; allowed: none, is, tis, "),
        ("schedule.mode=auto", "schedule.mode: 'auto' has no effect with style 'constant'"),
        (
            "name=..",
            "name: found '..'; use letters, digits, '.', '_' and '-', with no '.' first (set in --set name=..)",
        ),
        ("name=.hidden", "with no '.' first"),
        ("num_steps=" + "9" * 6000, "a number of 6000 characters is beyond 64 bits"),
        ("num_steps=1_0", "num_steps: found '1_0'; input should be a valid integer"),
        ("num_steps=1:30", "num_steps: found '1:30'"),
        ("validation.temperature=0.005", "validation.temperature: found 0.005; vLLM would raise it to 0.01; use 0"),
        ('model.path="a\\0b"', "NUL, or half of a character"),
        ('name="\\ud800"', "NUL, or half of a character"),
        ("validation.every=2", "(set: validation.every in --set validation.every=2)"),
        ("data.train.2.path=x", "data.train is a list of 1; after it comes the number of an item (0 … 1), found '2'"),
        ("data.train.path=x", "data.train is a list of 1; after it comes the number of an item (0 … 1), found 'path'"),
        ("batch..prompts=4", "--set 'batch..prompts=4': expected KEY.PATH=VALUE"),
        ("Batch.prompts=4", "Batch: unknown key; did you mean 'batch'?"),
        ("batch.foo.bar=4", "(set in --set batch.foo.bar=4)"),
        ("learner.dtype=BF16", "did you mean 'bf16'?"),
        ("data.train=[]", "data.train: found []; list should have at least 1 item (set in"),
        ("run_root=7", "run_root: found 7; input is not a valid path (set in"),
        ("batch=null", "batch: found null; expected a mapping with the keys prompts, minibatches, "),
        ("rollout.num_samples=1", "objective.advantage: grpo needs rollout.num_samples of at least 2"),
    ],
)
def test_messages_by_name(override, said, message):
    text = message({}, override)
    assert said in text, text


def test_a_rule_between_sections_says_where_each_of_its_keys_was_set(message, tmp_path):
    text = message({"batch": {"prompts": 3}, "rollout": {"num_samples": 3}}, "batch.minibatches=2")
    base = (tmp_path / "base.yaml").read_text().splitlines()
    lines = [f"{tmp_path}/base.yaml:{number}" for number, line in enumerate(base, 1) if ": 3" in line]
    assert f"(set: batch.minibatches in --set batch.minibatches=2; batch.prompts in {lines[0]}, " in text.replace(
        ", batch.prompts", "; batch.prompts"
    )
    assert f"rollout.num_samples in {lines[1]})" in text


def test_aliases_and_bases_that_double_are_refused_or_read_once(tmp_path):
    """60 doublings: what works one by one through them never ends."""
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    (tmp_path / "bomb.yaml").write_text(bomb)
    with pytest.raises(InputError, match=r"its aliases stand for .* values; at most 100000 are read"):
        load_recipe(tmp_path / "bomb.yaml")
    (tmp_path / "self.yaml").write_text("a: &a [*a]\n")
    with pytest.raises(InputError, match="a value that contains itself"):
        load_recipe(tmp_path / "self.yaml")
    (tmp_path / "0.yaml").write_text(yaml.safe_dump(SOUND))
    for number in range(1, 60):
        (tmp_path / f"{number}.yaml").write_text(
            f"extends: [{number - 1}.yaml, {number - 1}.yaml]\nseed: {number}\nname: n{number}\n"
        )
    assert load_recipe(tmp_path / "30.yaml").seed == 30
    with pytest.raises(InputError, match="extended through 32 files; at most 32 are followed"):
        load_recipe(tmp_path / "59.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 100_000)
    with pytest.raises(InputError, match="not valid YAML"):
        load_recipe(tmp_path / "deep.yaml")
    (tmp_path / "long.yaml").write_text("# " + "x" * 2**20)
    with pytest.raises(InputError, match="at most 1048576 are read"):
        load_recipe(tmp_path / "long.yaml")


def test_set_reaches_into_short_forms_and_lists(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        yaml.safe_dump({**SOUND, "data": {"train": ["a.jsonl", "b.jsonl"]}, "reward": "exact"})
        + "objective: {policy_term: gspo, aggregation: seq-mean-token-mean, correction: [tis, {mode: veto}]}\n"
    )

    def load(*overrides: str) -> Recipe:
        return load_recipe(path, overrides)

    assert [source.path for source in load("data.train.0.path=c.jsonl").data.train] == ["c.jsonl", "b.jsonl"]
    assert [source.limit for source in load("data.train.1.limit=7").data.train] == [None, 7]
    assert [source.path for source in load("data.train.2=d.jsonl").data.train] == ["a.jsonl", "b.jsonl", "d.jsonl"]
    assert load("data.validation.0.path=v.jsonl").data.validation[0].path == "v.jsonl"
    assert load("data.train=x.jsonl", "data.train.0.limit=2").data.train[0].limit == 2
    term = load("objective.policy_term.clip_low=1e-3").objective.policy_term
    assert (term.name, term.clip_low) == ("gspo", 1e-3)
    corrections = load("objective.correction.0.cap=5", "objective.correction.1=opsm").objective.correction
    assert [(item.mode, getattr(item, "cap", None)) for item in corrections] == [("tis", 5), ("opsm", None)]
    assert load("reward.timeout_s=9").reward.timeout_s == 9
    assert load("reward=math", "reward.timeout_s=9").reward.name == "math"
    assert load("validation.every=null", "checkpoint.keep_last=null", "objective.correction=null").validation.every == 0


def test_a_mapping_with_numbers_for_keys_stays_one(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({**SOUND, "reward": {"name": "by_source", "by_source": {"1": "math"}}}))
    assert load_recipe(path).reward.by_source == {"1": "math"}
    assert load_recipe(path, ["reward.by_source.2=exact"]).reward.by_source == {"1": "math", "2": "exact"}
    arguments = load_recipe(path, ["data.prompt.chat_template_args.0=x"]).data.prompt.chat_template_args
    assert arguments == {"0": "x"}
    (tmp_path / "l.yaml").write_text(yaml.safe_dump({**SOUND, "data": {"train": {"0": {"path": "x"}}}}))
    with pytest.raises(InputError, match=r"data\.train\.0\.0: unknown key"):
        load_recipe(tmp_path / "l.yaml")


def test_one_rule_for_relative_paths(tmp_path, monkeypatch):
    """Beside the recipe that names a file, where it is there, else in the working directory; `--set` the other way."""
    recipes, here = tmp_path / "recipes", tmp_path / "here"
    for folder in (recipes, here):
        folder.mkdir()
        for name in ("both.py", "both.jsonl", "both.jinja"):
            (folder / name).touch()
    (recipes / "beside.py").touch()
    (here / "here.py").touch()
    monkeypatch.chdir(here)
    sections = {
        "data": {"train": "both.jsonl", "prompt": {"chat_template": "both.jinja"}},
        "reward": "both.py:f",
        "model": {"path": "both.jsonl"},
    }
    (recipes / "r.yaml").write_text(yaml.safe_dump({**SOUND, **sections}))
    recipe = load_recipe(Path("../recipes/r.yaml"))
    paths = [recipe.data.train[0].path, recipe.data.prompt.chat_template, recipe.model.path]
    assert paths == [str(recipes / "both.jsonl"), str(recipes / "both.jinja"), recipes / "both.jsonl"]
    assert recipe.reward.name == f"{recipes}/both.py:f"
    for written, meant in (
        ("both.py:f", f"{here}/both.py:f"),
        ("beside.py:f", f"{recipes}/beside.py:f"),
        ("nowhere.py:f", "nowhere.py:f"),
        ("package.module:f", "package.module:f"),
        ("math", "math"),
    ):
        assert load_recipe("../recipes/r.yaml", [f"reward={written}"]).reward.name == meant
    by_source = "reward={name: by_source, by_source: {a: beside.py:f, b: math}}"
    assert load_recipe("../recipes/r.yaml", [by_source]).reward.by_source["a"] == f"{recipes}/beside.py:f"


def unknown_keys(count: int) -> str:
    return "name: x\nextends: recipes/tiny/grpo.yaml\n" + "".join(f"key{number}: 1\n" for number in range(count))


def test_the_first_of_many_problems_are_told(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(unknown_keys(500))
    with pytest.raises(InputError, match="and 460 problems more") as refused:
        load_recipe(path)
    assert len(str(refused.value).splitlines()) == 42


def test_a_link_to_itself_is_no_file(tmp_path):
    path = tmp_path / "x.yaml"
    path.symlink_to(path)
    with pytest.raises(InputError, match=r"x\.yaml: no such file$"):
        load_recipe(path)
    (tmp_path / "y.yaml").write_text("extends: x.yaml\n")
    with pytest.raises(InputError, match=r"x\.yaml: no such file \(extended by"):
        load_recipe(tmp_path / "y.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train.²=3", "after it comes the number of an item .*, found '²'"),
        ("²=3", "²: unknown key"),
        ("data.train." + "9" * 5000 + "=3", "after it comes the number of an item"),
        (".".join(["a"] * 5000) + "=1", "a path of 5000 parts; at most 32 are read"),
        (r'run_root="a\nb"', "holds a control character"),
        ("data=" + "[" * 200_000, "the value is not valid YAML"),
    ],
)
def test_an_override_that_no_recipe_has_a_place_for(override, message):
    with pytest.raises(InputError, match=message):
        load_recipe("recipes/tiny/grpo.yaml", [override])
