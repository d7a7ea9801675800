"""An independent statement of algorithms.md §1-§5 and §11: Python floats, one sequence and one token at a time.

It shares no code with megatron_rl.objective, and repeats the defaults, so that a changed default is a failed test.
A batch is a list of sequences; a sequence has lists pi, po, mu (log-probs), a (advantages per token), and an id.
Only trained tokens are in it: masking and padding are the tested code's business.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np

DEFAULTS = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"log_clip_low": 0.4, "log_clip_high": 0.4},
    "cispo": {"clip_low": None, "clip_high": 5.0},
    "reinforce": {},
    "minirl": {"cap": 5.0, "clip_low": 0.2, "clip_high": 0.27},
    "dppo": {"divergence": "tv", "delta": None, "delta_low": None, "cap": 20.0},
    "drpo": {"delta": 12.5},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "vespo": {"c1_positive": 2.0, "c2_positive": 3.0, "c1_negative": 3.0, "c2_negative": 2.0},
    "fipo": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 10.0,
        "half_life": 32.0,
        "influence_low": 1.0,
        "influence_high": 1.2,
        "safe_ratio": 4.0,
    },
}
ANCHORED = ("reinforce", "dppo", "drpo", "vespo")
CARRY_W = ("minirl", "dppo", "drpo", "vespo")
TERMS = [{"name": name} for name in DEFAULTS] + [
    {"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.05, "dual_clip": 1.15},
    {"name": "gspo", "clip_low": 0.05, "clip_high": 0.02},
    {"name": "cispo", "clip_high": 0.2},
    {"name": "cispo", "clip_low": 0.1, "clip_high": 0.2},
    {"name": "minirl", "cap": 1.1, "clip_low": 0.05, "clip_high": 0.1},
    {"name": "dppo", "divergence": "kl"},
    {"name": "dppo", "divergence": "tv", "delta": 0.02, "cap": 1.1},
    {"name": "dppo", "divergence": "kl", "delta": 0.001},
    {"name": "dppo", "divergence": "tv", "delta": 0.02, "delta_low": 0.01},
    {"name": "dppo", "divergence": "kl", "delta_low": 0.001},
    {"name": "drpo", "delta": 0.02},
    {"name": "vespo", "c1_positive": 1.0, "c2_positive": 0.5, "c1_negative": 0.5, "c2_negative": 4.0},
    {"name": "fipo", "influence_low": 0.0, "influence_high": 10.0, "half_life": 2.0, "dual_clip": 1.15},
    {"name": "fipo", "influence_low": 0.8, "safe_ratio": 1.1},
]
"""Each policy term by its defaults, and with every key that changes what it computes."""
CORRECTION_DEFAULTS = {
    "is": {"level": "token", "normalize": False},
    "tis": {"level": "token", "cap": 2.0, "lower": None, "normalize": False},
    "mis": {"level": "token", "cap": 3.0, "lower": None},
    "icepop": {"lower": 0.5, "upper": 5.0},
    "reject": {"statistic": "seq_mean_k3", "lower": None, "upper": None},
    "mask": {"level": "token", "lower": None, "upper": None},
    "veto": {"threshold": 1e-4},
    "opsm": {"delta": 1e-4, "pi_old": "rollout"},
    "m2po": {"threshold": 0.04},
}


@dataclass
class Seq:
    pi: list[float]
    po: list[float]
    mu: list[float]
    a: list[float]
    id: int = 0

    def __len__(self):
        return len(self.pi)


def clamp(x, low=-20.0, high=20.0):
    return min(max(x, low), high)


def ratio(log):
    return math.exp(clamp(log))


def slope(log):
    """d clamp(x) / dx."""
    return 1.0 if -20.0 <= log <= 20.0 else 0.0


def floor(log):
    return max(log, -1e4)


def fipo_influence(log_r: list[float], t: int, a: float, cfg: dict) -> float:
    """f_t = clip(exp(FutureKL_t), low, high); FutureKL_t = Σ_{k=t}^T γ^(k - t) M_k Δlog p_k."""
    log_p_shift, gamma = [clamp(x) for x in log_r], 2 ** (-1 / cfg["half_life"])
    future_kl = 0.0
    for k in range(t, len(log_r)):
        participates = math.exp(log_p_shift[k]) <= cfg["dual_clip"]
        future_kl += gamma ** (k - t) * participates * log_p_shift[k]
    f = clamp(ratio(future_kl), cfg["influence_low"], cfg["influence_high"])
    return clamp(f, 0.8, 1.0) if a < 0 and ratio(log_r[t]) > cfg["safe_ratio"] else f


def vespo_phi(log_w_of_tokens: list[float], a: float, cfg: dict) -> float:
    """φ(W) = W^c1 exp(c2 (1 - W)), W = Π_t ρ_t (the paper's ρ is w here)."""
    sign = "negative" if a < 0 else "positive"
    c1, c2 = cfg[f"c1_{sign}"], cfg[f"c2_{sign}"]
    big_w = ratio(sum(log_w_of_tokens))
    return math.exp(c1 * math.log(big_w) + c2 * (1 - big_w))


def term_values(seq: Seq, term: dict):
    """Per token t: the term l_t and a dict u → d l_t / d log pi_u; and which tokens count as clipped."""
    cfg = {**DEFAULTS[term["name"]], **term}
    name, length = term["name"], len(seq)
    log_r = [p - floor(q) for p, q in zip(seq.pi, seq.po)]
    losses, grads, clipped, lower = [], [], [], []
    for t in range(length):
        a, log_pi = seq.a[t], seq.pi[t]
        is_clipped, is_lower = False, False
        if name in ("ppo_clip", "gspo", "fipo"):
            log_s = sum(log_r) / length if name == "gspo" else log_r[t]
            if name == "fipo":
                a = a * fipo_influence(log_r, t, a, cfg)
            s = ratio(log_s)
            free, bounded = -s * a, -clamp(s, 1 - cfg["clip_low"], 1 + cfg["clip_high"]) * a
            loss = max(free, bounded)
            is_clipped = bounded > free
            grad = 0.0 if is_clipped else -s * a * slope(log_s)
            c = cfg.get("dual_clip")
            if c is not None and a < 0 and loss > -c * a:
                loss, grad, is_lower = -c * a, 0.0, True
            grad = {t: grad}
        elif name == "gmpo":

            def cut(x, a=a):
                return min(x, cfg["log_clip_high"]) if a > 0 else max(x, -cfg["log_clip_low"]) if a < 0 else x

            cuts = [cut(x) for x in log_r] if length else []
            mean = sum(cut(x, seq.a[u]) for u, x in enumerate(log_r)) / length
            s = ratio(mean)
            loss = -a * s
            is_clipped = cuts[t] != log_r[t]
            grad = {u: -a * s * slope(mean) / length if cut(x, seq.a[u]) == x else 0.0 for u, x in enumerate(log_r)}
        elif name == "cispo":
            least = 0 if cfg["clip_low"] is None else 1 - cfg["clip_low"]
            weight = clamp(ratio(log_r[t]), least, 1 + cfg["clip_high"])
            is_clipped = weight != ratio(log_r[t])
            loss, grad = -weight * a * log_pi, {t: -weight * a}
        elif name == "reinforce":
            loss, grad = -a * log_pi, {t: -a}
        elif name == "minirl":
            r, w = ratio(log_r[t]), ratio(log_pi - floor(seq.mu[t]))
            is_clipped = (a > 0 and r > 1 + cfg["clip_high"]) or (a < 0 and r < 1 - cfg["clip_low"])
            weight = 0.0 if is_clipped else min(w, cfg["cap"])
            loss, grad = -weight * a * log_pi, {t: -weight * a}
        elif name == "dppo":
            w, mu, pi = ratio(log_pi - floor(seq.mu[t])), math.exp(seq.mu[t]), math.exp(log_pi)
            if cfg["divergence"] == "tv":
                distance, delta = abs(mu - pi), cfg["delta"] or 0.15
            else:
                distance, delta = 0.0, cfg["delta"] or 0.05
                if mu > 0:
                    distance += mu * math.log(mu / pi)
                distance += (1 - mu) * (math.log(1 - mu) - math.log(1 - pi))
            if a < 0 and cfg["delta_low"] is not None:
                delta = cfg["delta_low"]
            away = (a > 0 and w > 1) or (a < 0 and w < 1)
            is_clipped = away and distance > delta
            weight = 0.0 if is_clipped else min(w, cfg["cap"])
            loss, grad = -weight * a * log_pi, {t: -weight * a}
        elif name == "drpo":
            mu, log_w = math.exp(floor(seq.mu[t])), log_pi - floor(seq.mu[t])
            r, delta = ratio(log_w), cfg["delta"]
            loss = -(r * a - abs(a) / (2 * delta) * mu * (r - 1) ** 2)
            sign = np.sign(a * (r - 1))
            weight = 1 - sign * abs(mu * r - mu) / delta  # Table 1
            is_clipped = bool(a != 0 and weight <= 0)
            grad = {t: -weight * r * a * slope(log_w)}
        elif name == "sapo":
            tau = cfg["tau_negative"] if a < 0 else cfg["tau_positive"]
            r = ratio(log_r[t])
            gate = 1 / (1 + math.exp(-tau * (r - 1))) if tau * (r - 1) > -700 else 0.0
            loss = -4 / tau * gate * a
            grad = {t: -4 * gate * (1 - gate) * r * slope(log_r[t]) * a}
        elif name == "vespo":
            phi = vespo_phi([p - floor(m) for p, m in zip(seq.pi, seq.mu)], a, cfg)
            loss, grad = -phi * a * log_pi, {t: -phi * a}
        losses.append(loss)
        grads.append(grad)
        clipped.append(is_clipped)
        lower.append(is_lower)
    return losses, grads, clipped, lower


def correction_weights(seq: Seq, corrections: list[dict], anchored: bool):
    """Weight of each token, which tokens were dropped, and which of those leave the denominators."""
    n = len(seq)
    weights, dropped, left_out = [1.0] * n, [False] * n, [False] * n
    log_rho = [(p if anchored else floor(q)) - floor(m) for p, q, m in zip(seq.pi, seq.po, seq.mu)]
    for entry in corrections:
        mode = entry["mode"]
        if mode == "none":
            continue
        cfg = {**CORRECTION_DEFAULTS[mode], **entry}
        if n == 0:
            continue
        mean = sum(log_rho) / n
        at = {
            "token": lambda t: ratio(log_rho[t]),
            "sequence": lambda t: ratio(sum(log_rho)),
            "geometric": lambda t: ratio(sum(log_rho) / n),
        }
        k3 = [math.exp(clamp(x)) - 1 - clamp(x) for x in log_rho]
        olds = seq.mu if cfg.get("pi_old") == "rollout" else seq.po
        drift = sum(floor(q) - p for p, q in zip(seq.pi, olds)) / n
        for t in range(n):
            rho = at[cfg.get("level", "token")](t)
            w, keep = 1.0, True
            if mode == "is":
                w = rho
            elif mode == "tis":
                w = max(min(rho, cfg["cap"]), cfg["lower"] or 0)
            elif mode == "mis":
                w, keep = rho, rho <= cfg["cap"] and rho >= (cfg["lower"] or 0)
            elif mode == "icepop":
                w, keep = rho, cfg["lower"] <= rho <= cfg["upper"]
            elif mode == "reject":
                value = {
                    "geometric": math.exp(clamp(mean, -700, 700)),
                    "seq_mean_k1": math.exp(clamp(mean, -700, 700)),
                    "seq_mean_k3": sum(k3) / n,
                    "max_k3": max(k3),
                }[cfg["statistic"]]
                keep = (cfg["lower"] is None or value >= cfg["lower"]) and (
                    cfg["upper"] is None or value <= cfg["upper"]
                )
            elif mode == "mask":
                keep = (cfg["lower"] or 0) <= rho <= (math.inf if cfg["upper"] is None else cfg["upper"])
            elif mode == "veto":
                keep = all(x >= math.log(cfg["threshold"]) for x in log_rho)
            elif mode == "opsm":
                keep = not (seq.a[t] < 0 and drift > cfg["delta"])
            weights[t] *= w if keep else 0.0
            if not keep:
                dropped[t] = True
                left_out[t] = left_out[t] or bool(cfg.get("renormalize"))
    return weights, dropped, left_out


def m2po_masks(batch: list[Seq], threshold: float) -> list[list[bool]]:
    """M_it [arXiv 2510.01161]: trust-region tokens (A > 0 and r > 1, or A < 0 and r < 1) are masked, the largest
    (log r)² first, until M2, the mean of (log r)² over the rest of them, is at most τ. Equal ones go together."""
    log_r = [[clamp(floor(q) - floor(m)) for q, m in zip(s.po, s.mu)] for s in batch]
    region = [
        (x**2, i, t)
        for i, (s, row) in enumerate(zip(batch, log_r))
        for t, x in enumerate(row)
        if (s.a[t] > 0 and x > 0) or (s.a[t] < 0 and x < 0)
    ]
    while region and sum(x for x, _, _ in region) / len(region) > threshold:
        largest = max(region)[0]
        region = [item for item in region if item[0] < largest]
    kept = {(i, t) for _, i, t in region}
    inside = [[(s.a[t] > 0 and x > 0) or (s.a[t] < 0 and x < 0) for t, x in enumerate(r)] for s, r in zip(batch, log_r)]
    return [[not there or (i, t) in kept for t, there in enumerate(row)] for i, row in enumerate(inside)]


M64 = (1 << 64) - 1


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def normal(seed, step, sequence_id, place):
    golden = 0x9E3779B97F4A7C15
    base = mix((mix((seed + golden) & M64) + step + golden) & M64)
    key = mix(mix((sequence_id + golden) & M64) ^ base)
    bits = mix((key + (place + 1) * golden) & M64)
    u1, u2 = ((bits >> 32) + 1) / 2**32, (bits & 0xFFFFFFFF) / 2**32
    return math.sqrt(-2 * math.log(u1)) * math.cos(2 * math.pi * u2)


def reference_objective(batch: list[Seq], config: dict, seed: int = 0, step: int = 0):
    """Loss and gradient (one list per sequence) of the whole mini-batch."""
    term = config.get("policy_term", {"name": "ppo_clip"})
    corrections = config.get("correction", [])
    weights = [correction_weights(s, corrections, term["name"] in ANCHORED) for s in batch]
    for entry in corrections:
        if entry["mode"] == "m2po":
            masks = m2po_masks(batch, {**CORRECTION_DEFAULTS["m2po"], **entry}["threshold"])
            weights = [([w * m for w, m in zip(row, mask)], *rest) for (row, *rest), mask in zip(weights, masks)]
        if entry.get("normalize"):
            alone = [correction_weights(s, [entry], anchored=False)[0] for s in batch]
            on_tokens = entry.get("level", "token") == "token"
            seen = [w for row in alone for w in row] if on_tokens else [row[0] for row in alone if row]
            weights = [([w * len(seen) / sum(seen) for w in row], *rest) for row, *rest in weights]
    kept = [[not out for out in w[2]] for w in weights]
    renormalize = any(c.get("renormalize") for c in corrections)
    num_tokens = sum(sum(k) for k in kept)
    num_sequences = sum(1 for s, k in zip(batch, kept) if not renormalize or any(k) or len(s) == 0)
    loss, grads = 0.0, []
    for seq, (weight, _, _), keep in zip(batch, weights, kept):
        losses, term_grads, _, _ = term_values(seq, term)
        grad = [0.0] * len(seq)
        for t in range(len(seq)):
            factor = {
                "token-mean": 1 / max(num_tokens, 1),
                "seq-mean-token-mean": 1 / max(num_sequences, 1) / max(sum(keep), 1),
                "seq-mean-token-sum": 1 / max(num_sequences, 1),
                "seq-mean-token-sum-norm": 1 / max(num_sequences, 1) / (config.get("max_response_length") or 1),
            }[config.get("aggregation", "token-mean")] * weight[t]
            if config.get("distortion") and math.exp(seq.po[t]) < config["distortion"].get("low_prob", 0.1):
                factor *= config["distortion"]["delta"]
            if config.get("variance"):
                factor *= 1 + config["variance"]["sigma"] * normal(seed, step, seq.id, t)
            loss += factor * losses[t]
            for u, g in term_grads[t].items():
                grad[u] += factor * g
        grads.append(grad)
    return loss, grads


def router_shift_weight(r_old: list[list[float]], r_phi: list[list[float]], gamma_min: float) -> float:
    """γ̃ of a token [arXiv 2510.23027 Eqs 5-9]: r[l][k] are the scores of the K old experts of layer l."""
    d = [sum(abs(math.log(new) - math.log(old)) for new, old in zip(n, o)) / len(o) for n, o in zip(r_phi, r_old)]
    gamma = math.exp(-sum(d) / len(d))
    return max(gamma, gamma_min)


def optimal_baseline(R: list[float], u: list[float]) -> float:
    """b* = Σ w_i² |∇ log pi(τ_i)|² R_i / Σ w_i² |∇ log pi(τ_i)|² [arXiv 2602.17616]; u_i = w_i² |∇ log pi(τ_i)|²."""
    return sum(u_i * R_i for u_i, R_i in zip(u, R)) / sum(u)


def effective_sample_size(w: list[float]) -> float:
    """ρ_ess = ESS / B = (1/B) (Σ_i w_i)² / Σ_i w_i² [arXiv 2602.17616]."""
    return sum(w) ** 2 / sum(w_i * w_i for w_i in w) / len(w)


def reference_mismatch(batch: list[Seq], bands=(0.01, 0.1, 0.5, 0.9)) -> dict[str, float]:
    live = [s for s in batch if len(s)]
    po, mu = np.array([x for s in live for x in s.po]), np.array([floor(x) for s in live for x in s.mu])
    rho = np.array([ratio(x) for x in po - mu])
    d = [np.array([floor(m) - p for p, m in zip(s.po, s.mu)]) for s in live]
    gap = np.abs(np.exp(po) - np.exp(mu))
    k3 = [math.exp(clamp(x)) - 1 - clamp(x) for x in po - mu]
    metrics = {
        "rollout_corr/kl": np.mean(mu - po),
        "rollout_corr/k3_kl": np.mean(k3),
        "rollout_corr/chi2_token": np.mean(rho**2) - 1,
        "rollout_corr/chi2_seq": np.mean([ratio(-x.sum()) ** 2 for x in d]) - 1,
        "rollout_corr/eff_sample_size_seq": effective_sample_size([ratio(-x.sum()) for x in d]),
        "rollout_corr/log_ppl_abs_diff": np.mean([abs(x.mean()) for x in d]),
        "rollout_corr/log_ppl_abs_diff_sum": np.mean([abs(x.sum()) for x in d]),
        "rollout_corr/ppl_ratio": np.mean([ratio(x.mean()) for x in d]),
        "training/rollout_probs_diff_mean": gap.mean(),
        "training/rollout_probs_diff_max": gap.max(),
        "training/rollout_probs_diff_std": gap.std(ddof=1),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(np.exp(po), np.exp(mu))[0, 1],
        "mismatch/rho_std": rho.std(ddof=1),
        "mismatch/rho_max": rho.max(),
        "mismatch/pcc": np.corrcoef(np.exp(po), np.exp(mu))[0, 1],
    }
    edges = [0.0, *bands, 1.0]
    for low, high in itertools.pairwise(edges):
        inside = (np.exp(po) >= low) & ((np.exp(po) < high) | (high == 1.0))
        label = f"{low:g}-{high:g}"
        metrics[f"mismatch/rho_count/{label}"] = float(inside.sum())
        if inside.any():
            metrics[f"mismatch/rho_mean/{label}"] = rho[inside].mean()
    return {name: float(value) for name, value in metrics.items()}
