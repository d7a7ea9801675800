"""The objective of another project's run: advantages, policy term, aggregation and corrections.

Rules were read from the sources of `config.foreign_keys.READ_FROM`. verl: `core_algos.py`, `rollout_corr_helper.py`.
slime: `loss.py`, `ppo_utils.py`, `ray/rollout.py`. NeMo-RL: `loss_functions.py`, `advantage_estimator.py`.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_rl.instruments.translate.translation import Translation, real, whole

ADVANTAGES = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus_baseline": "reinforce_pp",
}
"""Their estimators with the same advantage here."""


def objective(t: Translation) -> None:
    """Translate the objective."""
    _advantage(t)
    term, is_bypass = _policy_term(t), t["bypass"] is True
    _aggregation(t, term)
    if is_bypass and term not in ("reinforce", "dppo"):
        t.put("objective.anchor", "bypass")
    corrections = {"verl": _of_verl, "slime": _of_slime, "NeMo-RL": _of_nemo_rl}[t.project](t, term, is_bypass)
    if corrections:
        t.put("objective.correction", corrections)
    if t["centered"] is True:
        kept = t.ours("rollout.kept_sets")
        of_tokens = all(item.get("level", "token") == "token" for item in corrections)
        if term == "reinforce" and of_tokens and (kept or not t.ours("rollout.top_k")):
            t.put("objective.score_centering", True)
            t.guess(
                "rollout.sampled_head", t.ours("rollout.top_k") if kept else 128, "as in the paper, or the kept set"
            )
        else:
            t.lose("centered", "scores are not centred: that needs policy term reinforce, and weights of single tokens")
    _teacher(t)
    _divergence(t)


def _divergence(t: Translation) -> None:
    """The KL to a reference policy, in the loss and in the reward."""
    coefficient, of_reward = real(t["kl_coefficient"]) or 0, real(t["kl_of_reward"]) or 0
    in_loss = coefficient > 0 and (t["kl_loss"] is True or t.project == "NeMo-RL")
    in_reward = t["kl_in_reward"] is True and t.project == "verl" and of_reward > 0
    if t.project == "NeMo-RL" and t["kl_in_reward"] is True:
        t.lose("kl_in_reward", "advantages of tokens lack the KL of the token; objective.kl_in_reward is of responses")
        in_loss = False
    if t.project == "slime" and of_reward and str(t["estimator"]).startswith("reinforce_plus_plus"):
        t.lose("kl_of_reward", "advantages of tokens lack the KL of the token; objective.kl_in_reward is of responses")
    if not (in_loss or in_reward):
        return
    if not t.ours("rollout.kept_sets") and ((t.ours("rollout.top_p") or 1) < 1 or t.ours("rollout.top_k")):
        t.lose("kl_coefficient" if in_loss else "kl_in_reward", "responses are of a part of the tokens: no KL is known")
        return
    t.put("reference", {}, "the model that the run starts from, in place of --ref-load" if t.project == "slime" else "")
    if in_loss and (kind := _kl_type(str(t["kl_type"]))):
        t.put("objective.kl_loss", {"coef": coefficient, "type": kind})
        if kind.startswith("k3") and (t.project == "NeMo-RL" or (t["kl_type"] == "k3" and t.project == "slime")):
            t.put("objective.kl_loss.cap", real(t["kl_cap"]) if t.project == "NeMo-RL" else None)
        if t["kl_weighed"] is True and t.project == "slime":
            t.put("objective.kl_loss.unbiased", True)
        elif t["kl_weighed"] is True:
            t.lose(
                "kl_weighed", "the KL is not weighed; objective.kl_loss.unbiased weighs it, with the ratio's gradient"
            )
    elif in_loss:
        t.lose("kl_type", f"no such estimate: the loss lacks {coefficient:g} times the KL")
    if in_reward and (kind := _kl_type(str(t["kl_reward_type"])).rstrip("+")):
        t.put("objective.kl_in_reward", {"coef": of_reward, "type": kind})
        if t["kl_controller"] != "fixed":
            t.lose("kl_controller", "the coefficient stays as it is")
    elif in_reward:
        t.lose("kl_reward_type", f"no such estimate: rewards lack {of_reward:g} times the KL")


def _kl_type(name: str) -> str:
    """Ours for an estimate of theirs; "" where there is none."""
    base, plus = name.rstrip("+"), "+" * name.endswith("+")
    ours = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(base, base)
    plain = ours if ours in ("k1", "k2", "k3") else ""
    return plain + plus * (plain in ("k1", "k3"))


def _teacher(t: Translation) -> None:
    """slime subtracts from advantages as here; verl does where its distillation is a policy gradient of log-ratios."""
    if t["teaches"] is not True or (sets := _sets(t)) is None:
        return
    cut = (t.ours("rollout.top_p") or 1) < 1 or bool(t.ours("rollout.top_k"))
    drops = not sets and any(item["mode"] == "opsm" for item in t.ours("objective.correction") or ())
    if cut or drops or t.ours("batch.filter_groups"):
        t.lose("teaches", "there is no teacher: it goes with no top-p, top-k, filter of groups or opsm")
        return
    t.put("teacher.engine", "learner", "" if t["teacher_kind"] == "megatron" else "in the place of a server of theirs")
    named = {value for key, value in t.values.items() if ".teacher_model_by_agent_name." in key}
    path = named.pop() if len(named) == 1 else t.path_of("teacher", "TEACHER")
    t.guess("teacher.path", path or "TEACHER", "give its folder in Hugging Face layout")
    if named:
        t.note("on_policy_distillation has several teachers: teacher.by_source names one for each data source")
    alone = t["estimator"] == "opd" or t["distils_alone"] is False
    t.put("teacher.weight", 1.0 if alone or t.project == "NeMo-RL" else real(t["teacher_weight"]))
    if alone:
        t.put("objective.advantage", "none")
    for key, value in sets.items():
        t.put(key, value)


def _sets(t: Translation) -> dict[str, Any] | None:
    """Our keys for the sets of tokens that a teacher is compared on, empty without; None where nothing is the same."""
    size = {"teacher.top_k": whole(t["set_size"])}
    if t.project == "verl":
        name, by_policy = t["distils_by"], t["distils_by_policy"] is True
        if by_policy and name in ("kl", "k1"):
            return {}
        if not by_policy and name == "forward_kl_topk":
            t.note("distillation losses below 0 count here; verl takes them for 0")
            return {**size, "teacher.forward": 1.0, "teacher.normalized": False}
        t.lose(
            "teaches",
            "nothing is distilled: a teacher lowers advantages, as k1 does by policy gradient, or its sets are in the "
            "loss, as forward_kl_topk",
        )
        return None
    if not size["teacher.top_k"]:
        return {}
    if t.project == "NeMo-RL":
        if t["outside_sets"] is True:
            t.lose("outside_sets", "tokens outside of a set do not count")
        share = {"forward": 1.0, "reverse": 0.0}.get(t["divergence"], real(t["forward"]))
        return {**size, "teacher.forward": share}
    tokens = {"only-student": "student", "only-teacher": "teacher"}.get(t["sets_of"])
    if tokens is None or t["weighs_sets"] != "student_p":
        t.lose("set_size", "nothing is distilled: sets are of one policy, and weighed by the student")
        return None
    t.note(
        "--opd-log-prob-top-k: theirs is an advantage of a place, equal for all tokens, so that its mean gradient on "
        "policy is 0; here the loss has the divergence, with its gradient"
    )
    heads = {"teacher.tokens": tokens, "rollout.sampled_head": size["teacher.top_k"]} if tokens == "student" else {}
    return {**size, **heads}


def _advantage(t: Translation) -> None:
    name, ours = str(t["estimator"]), "objective.advantage"
    if name == "opd" and t["teaches"] is True:
        return
    if name == "reinforce_plus_plus" and t.project == "NeMo-RL" and t["minus_baseline"] is not False:
        name = "reinforce_plus_plus_baseline"
    same = ADVANTAGES.get(name)
    if t["by_std"] is False or t["without_std"] is True:
        same = {"grpo": "rloo" if t["leave_one_out"] is True else "dr_grpo"}.get(same, same)
    elif t["leave_one_out"] is True and same == "grpo":
        t.lose("leave_one_out", "mean and deviation are of the whole group, the response itself included")
    if t.ours("rollout.num_samples") < 2 and (same != "reinforce_pp" or t.project != "slime"):
        t.guess(ours, "reinforce", "there is one response a prompt, and so no group")
    elif same == "grpo" and t["without_mean"] is True:
        t.put(ours, "reinforce", "the reward itself")
    elif same is not None:
        t.put(ours, same)
    else:
        effects = {
            "gae": "there is no value function",
            "ppo": "there is no value function",
            "reinforce_plus_plus": "theirs whitens over the batch without the mean of the group",
        }
        t.lose("estimator", effects.get(name, "no such advantage; see docs/add-an-objective.md"))
        t.guess(ours, "reinforce_pp" if name == "reinforce_plus_plus" else "grpo", f"in place of {name}")
    if t["whiten"] is True and same != "reinforce_pp":
        t.lose("whiten", "advantages of a group are not whitened over the batch again")


def _policy_term(t: Translation) -> str:
    """The name of ours."""
    mode = str(t["loss"] or "vanilla")
    if t.project == "slime":
        mode = str(t["estimator"]) if t["estimator"] in ("gspo", "cispo") else "vanilla"
    for name in ("gspo", "reinforce", "cispo"):
        mode = name if t[name] is True else mode
    low, bound = real(t["low"]) or 0.2, real(t["dual"])
    high = real(t["high"]) or low
    cap = 3.0 if bound is None else bound
    terms: dict[str, dict[str, Any]] = {
        "vanilla": {"name": "ppo_clip", "clip_low": low, "clip_high": high} | ({"dual_clip": bound} if bound else {}),
        "gspo": {"name": "gspo", "clip_low": low, "clip_high": high},
        "geo_mean": {"name": "gmpo", "log_clip_low": low, "log_clip_high": high},
        "cispo": {"name": "cispo", "clip_low": low if low < 1 else None, "clip_high": high},
        "dppo_tv": {"name": "dppo", "divergence": "tv", "delta": high, "delta_low": low, "cap": cap},
        "dppo_kl": {"name": "dppo", "divergence": "kl", "delta": high, "delta_low": low, "cap": cap},
        "sapo": {"name": "sapo"}
        | {key: real(t[key]) for key in ("tau_positive", "tau_negative") if t[key] is not None},
        "reinforce": {"name": "reinforce"},
    }
    if t["bypass"] is True and t["loss_type"] == "reinforce":
        mode = "reinforce"
    if mode in terms:
        remark = "a lower bound of 1 or more is a ratio of 0 or less, and bounds nothing" if low >= 1 else ""
        if mode.startswith("dppo") and t["bypass"] is not True:
            remark = "measured from the engine's probability; verl's from the learner's at rollout weights"
        t.put("objective.policy_term", terms[mode], remark)
    else:
        t.lose("loss", "no such policy term; docs/add-an-objective.md says how to add one")
        t.guess("objective.policy_term", terms["vanilla"], f"in place of {mode}")
    if t.is_set("dual") and t.project != "verl" and mode != "vanilla":
        t.lose("dual", f"{mode} has no bound for negative advantages")
    return terms.get(mode, terms["vanilla"])["name"]


def _aggregation(t: Translation, term: str) -> None:
    ours, name = "objective.aggregation", t["aggregation"]
    if t.project != "verl":
        t.put(ours, "token-mean" if t["by_token"] is True else "seq-mean-token-mean")
    elif term in ("gspo", "gmpo"):
        t.put(ours, "seq-mean-token-mean", f"verl's {term} averages over sequences whatever loss_agg_mode says")
    elif name == "token-sum":
        t.guess(ours, "token-mean", "in place of token-sum: the factor of the number of tokens is Adam's, but for eps")
    else:
        t.put(ours, name)
    if t.ours(ours) == "seq-mean-token-sum-norm" and (scale := whole(t["norm"])) is not None:
        t.put("objective.max_response_length", scale)


def _of_verl(t: Translation, term: str, is_bypass: bool) -> list[dict[str, Any]]:
    """Weights and masks. verl's bounds for k1 = -log ratio bound 1/ratio; a masked token leaves its count of tokens."""
    corrections: list[dict[str, Any]] = []
    level, bound = t["weighs"], t["bound"]
    if (cap := real(t["token_cap"]) or 0) > 0:
        level, bound = "token", cap
    if level is not None and term != "reinforce" and (is_bypass or term == "dppo"):
        t.lose("weighs", "the ratio of this policy term is against the engine already, as verl's is")
    elif level is not None:
        lower, _, upper = str(bound).rpartition("_")
        item: dict[str, Any] = {"mode": "mis" if lower else "tis", "level": level, "cap": float(upper)}
        if lower:
            item["lower"] = float(lower)
        elif t["normalize"] is True and not is_bypass:
            item["normalize"] = True
        elif t["normalize"] is True:
            t.lose("normalize", "the weight is not divided by its mean, because it depends on the policy under way")
        corrections.append(item)
    options = [part.strip() for part in str(t["rejects"] or "").split(",") if part.strip()]
    bounds = [part.strip() for part in str(t["rejects_at"]).split(",")]
    out = {"renormalize": True} if not is_bypass and t.ours("objective.aggregation") == "token-mean" else {}
    for option, bound in zip(options, bounds * len(options) if len(bounds) == 1 else bounds, strict=False):
        if (rejection := _rejection(option, bound)) is None:
            t.lose("rejects", f"nothing is dropped by {option}: no such statistic")
        else:
            corrections.append(rejection | out)
    if options and is_bypass:
        t.note("a dropped token keeps its place in the denominators here; in verl it leaves the count of tokens")
    return corrections


def _rejection(option: str, bound: str) -> dict[str, Any] | None:
    modes: dict[str, dict[str, Any]] = {
        "token_k1": {"mode": "mask", "level": "token"},
        "seq_sum_k1": {"mode": "mask", "level": "sequence"},
        "seq_mean_k1": {"mode": "reject", "statistic": "seq_mean_k1"},
        "seq_mean_k3": {"mode": "reject", "statistic": "seq_mean_k3"},
        "seq_max_k3": {"mode": "reject", "statistic": "max_k3"},
        "token_k2": {"mode": "mask", "level": "token"},
    }
    if option not in modes:
        return None
    if option.endswith("_k3"):
        return modes[option] | {"upper": float(bound)}
    if option == "token_k2":  # (log ratio)² / 2 <= c bounds the ratio on both sides
        edge = math.exp(math.sqrt(2 * float(bound)))
        return modes[option] | {"lower": 1 / edge, "upper": edge}
    lower, _, upper = bound.rpartition("_")
    low, high = (float(lower) if lower else 1 / float(upper)), float(upper)
    return modes[option] | {"lower": round(1 / high, 12), "upper": round(1 / low, 12)}


def _of_slime(t: Translation, term: str, is_bypass: bool) -> list[dict[str, Any]]:
    corrections: list[dict[str, Any]] = []
    low, high = real(t["least"]) or 0, real(t["bound"]) or 2.0
    if t["weighs"] is True:
        function = str(t["weight"] or "")
        if function.endswith("icepop_function"):
            icepop = {"mode": "icepop", "lower": low, "upper": high}
            corrections.append(icepop if low > 0 else {"mode": "mis", "level": "token", "cap": high})
        else:
            corrections.append({"mode": "tis", "level": "token", "cap": high} | ({"lower": low} if low > 0 else {}))
            if function:
                t.lose("weight", "your function is not called; tis stands in its place")
    if t["opsm"] is True:
        anchor = "rollout" if is_bypass else "learner"
        corrections.append({"mode": "opsm", "delta": real(t["opsm_delta"]), "pi_old": anchor})
    return corrections


def _of_nemo_rl(t: Translation, term: str, is_bypass: bool) -> list[dict[str, Any]]:
    kind, low, high = t["weight"], real(t["least"]), real(t["bound"])
    if t["weighs"] is not True:
        return []
    level, bounds = "sequence" if term == "gspo" else "token", {"lower": low} if low else {}
    if kind is None or high is None:
        return [{"mode": "is", "level": level}]
    if kind == "tis":
        return [{"mode": "tis", "level": level, "cap": high, **bounds}]
    if kind == "icepop" and level == "token" and low:
        return [{"mode": "icepop", "lower": low, "upper": high}]
    if kind == "icepop":
        return [{"mode": "mis", "level": level, "cap": high, **bounds}]
    return [{"mode": "is", "level": "token"}, {"mode": "reject", "statistic": "geometric", "upper": high, **bounds}]
