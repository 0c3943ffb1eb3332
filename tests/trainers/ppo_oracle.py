"""One PPO update once more, in NumPy and double precision, from raw logits: loops over tokens, nothing of Accord.

It shares no line with the trainer and no idea of packs: every response is a list of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Answer:
    """One response, with the raw logits [T, V] of the sampled tokens' positions."""

    tokens: list[int]
    group: int
    score: float
    truncated: bool
    old_logits: np.ndarray
    ref_logits: np.ndarray
    new_logits: np.ndarray
    old_values: np.ndarray | None
    new_values: np.ndarray | None
    sampler: np.ndarray  # [T] the sampler's log-probabilities


@dataclass
class Result:
    metrics: dict[str, float]
    advantages: list[np.ndarray]
    logit_gradients: list[np.ndarray]  # of the whole objective by the new logits
    value_gradients: list[np.ndarray] = field(default_factory=list)


def log_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    z = logits.astype(np.float64) / temperature
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def kl_of(d: float, estimator: str) -> tuple[float, float]:
    """(estimate, its derivative by log π)."""
    return {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (np.exp(-d) - 1 + d, 1 - np.exp(-d)),
        "abs": (abs(d), np.sign(d)),
    }[estimator]


def standardised(rows: list[np.ndarray], keep_mean: bool = False) -> list[np.ndarray]:
    every = np.concatenate(rows)
    mean, std = every.mean(), every.std()
    return [(row - mean) / (std + 1e-8) + (mean if keep_mean else 0.0) for row in rows]


def ppo_update(answers: list[Answer], s: dict) -> Result:
    """`s`: the keys of `ppo` and of `ppo.kl` (as kl_…), temperature and max_new_tokens."""
    count = len(answers)
    tokens = sum(len(a.tokens) for a in answers)
    old, ref, new, p_old, p_ref, p_new = [], [], [], [], [], []
    for a in answers:
        for logits, full, chosen in ((a.old_logits, p_old, old), (a.ref_logits, p_ref, ref), (a.new_logits, p_new, new)):
            logp = log_softmax(logits, s["temperature"])
            full.append(logp)
            chosen.append(np.array([logp[t, token] for t, token in enumerate(a.tokens)]))

    # scores: normalised by running moments (here: of these scores alone), clipped, fined
    shaped = np.array([a.score for a in answers])
    if s["normalize_score"]:
        shaped = (shaped - shaped.mean()) / shaped.std(ddof=1)
    if s["clip_reward"] is not None:
        shaped = np.clip(shaped, -s["clip_reward"], s["clip_reward"])
    shaped = shaped - s["missing_eos_penalty"] * np.array([a.truncated for a in answers])

    rewards, penalties = [], []
    for i, a in enumerate(answers):
        row = np.zeros(len(a.tokens))
        if s["kl_place"] == "reward":
            for t in range(len(a.tokens)):
                if s["kl_estimator"] == "full":
                    k = float(np.sum(np.exp(p_old[i][t]) * (p_old[i][t] - p_ref[i][t])))
                else:
                    k = kl_of(old[i][t] - ref[i][t], s["kl_estimator"])[0]
                row[t] = -s["kl_coef"] * k
        penalties.append(row.sum())
        row[-1] += shaped[i]
        rewards.append(row)
    if s["whiten_rewards"]:
        rewards = standardised(rewards, keep_mean=True)

    advantages, returns = [], []
    sums = np.array([row.sum() for row in rewards])
    for i, a in enumerate(answers):
        row, T = rewards[i], len(a.tokens)
        mates = [j for j, b in enumerate(answers) if b.group == a.group]
        if s["advantage"] == "gae":
            values = np.append(a.old_values, 0.0)
            deltas = [row[t] + s["gamma"] * values[t + 1] - values[t] for t in range(T)]
            estimate = np.array([sum((s["gamma"] * s["lam"]) ** (k - t) * deltas[k] for k in range(t, T)) for t in range(T)])
            returns.append(estimate + a.old_values)
        elif s["advantage"] == "reinforce_pp":
            estimate = np.array([sum(s["gamma"] ** (k - t) * row[k] for k in range(t, T)) for t in range(T)])
        elif s["advantage"] == "rloo":
            estimate = np.full(T, sums[i] - np.mean([sums[j] for j in mates if j != i]))
        else:
            estimate = np.full(T, sums[i] - np.mean(sums[mates]))
            if s["group_std"]:
                estimate /= np.std(sums[mates], ddof=1) + 1e-6
        advantages.append(estimate)
    if s["whiten_advantages"]:
        advantages = standardised(advantages)

    sums_of = dict.fromkeys(("policy_loss", "kl_loss", "old_kl_loss", "approx_kl", "ratio_mean", "clip_fraction"), 0.0)
    sums_of |= dict.fromkeys(("value_loss", "value_clip_fraction", "importance_weight"), 0.0)
    logit_gradients, value_gradients = [], []
    for i, a in enumerate(answers):
        T = len(a.tokens)
        weight = {"token": 1 / tokens, "sequence": 1 / (count * T), "constant": 1 / (count * s["max_new_tokens"])}[
            s["aggregation"]
        ]
        log_ratio = new[i] - old[i]
        correction = np.ones(T)
        if s["old_logprobs"] == "sampler":
            off = old[i] - a.sampler
            correction = np.minimum(np.exp(np.full(T, off.mean()) if s["ratio"] == "sequence" else off), s["is_clip"])
        sums_of["importance_weight"] += correction.sum() / tokens
        by_logp = np.zeros(T)  # derivative of the objective by log π(y_t)
        gradient = np.zeros_like(p_new[i])
        for t in range(T):
            w, A = weight * correction[t], advantages[i][t]
            rho = np.exp(log_ratio.mean() if s["ratio"] == "sequence" else log_ratio[t])
            high = s["clip"] if s["clip_high"] is None else s["clip_high"]
            plain, limited = -A * rho, -A * min(max(rho, 1 - s["clip"]), 1 + high)
            term, moves = (limited, False) if limited > plain else (plain, True)
            if s["dual_clip"] is not None and A < 0 and term > -s["dual_clip"] * A:
                term, moves = -s["dual_clip"] * A, False
            sums_of["policy_loss"] += w * term
            sums_of["ratio_mean"] += rho / tokens
            sums_of["clip_fraction"] += (not moves) / tokens
            sums_of["approx_kl"] += (np.exp(log_ratio[t]) - 1 - log_ratio[t]) / tokens
            if moves and s["ratio"] == "sequence":
                by_logp += -w * A * rho / T
            elif moves:
                by_logp[t] += -w * A * rho
            p, q = p_new[i][t], p_ref[i][t]
            if s["kl_place"] == "loss" and s["kl_estimator"] == "full":
                k = float(np.sum(np.exp(p) * (p - q)))
                sums_of["kl_loss"] += w * k
                gradient[t] += s["kl_coef"] * w * np.exp(p) * (p - q - k)
            elif s["kl_place"] == "loss":
                k, slope = kl_of(new[i][t] - ref[i][t], s["kl_estimator"])
                sums_of["kl_loss"] += w * k
                by_logp[t] += s["kl_coef"] * w * slope
            k, slope = kl_of(new[i][t] - old[i][t], "k3")
            sums_of["old_kl_loss"] += w * k
            by_logp[t] += s["old_kl_coef"] * w * slope
            entropy = -float(np.sum(np.exp(p) * p))
            gradient[t] += s["entropy_coef"] * w * np.exp(p) * (p + entropy)
        for t, token in enumerate(a.tokens):
            gradient[t] -= by_logp[t] * np.exp(p_new[i][t])
            gradient[t, token] += by_logp[t]
        logit_gradients.append(gradient / s["temperature"])
        if s["advantage"] == "gae":
            slopes = np.zeros(T)
            for t in range(T):
                v, v_old, target = a.new_values[t], a.old_values[t], returns[i][t]
                error, slope, cut = (v - target) ** 2, v - target, False
                if s["value_clip"] is not None:
                    held = min(max(v, v_old - s["value_clip"]), v_old + s["value_clip"])
                    if (held - target) ** 2 > error:
                        error, slope, cut = (held - target) ** 2, 0.0, True
                sums_of["value_loss"] += weight * error / 2
                sums_of["value_clip_fraction"] += cut / tokens
                slopes[t] = s["value_coef"] * weight * slope
            value_gradients.append(slopes)

    k1 = [old[i] - ref[i] for i in range(count)]
    metrics = {f"ppo/{name}": value for name, value in sums_of.items()} | {
        "ppo/score": float(np.mean([a.score for a in answers])),
        "ppo/score_std": float(np.std([a.score for a in answers])),
        "ppo/kl": float(np.mean([row.sum() for row in k1])),
        "ppo/kl_per_token": float(np.concatenate(k1).mean()),
        "ppo/non_score_reward": float(np.mean(penalties)),
        "ppo/entropy": float(np.mean([-np.sum(np.exp(p) * p) for full in p_old for p in full])),
        "ppo/response_length": tokens / count,
        "ppo/eos_rate": 1 - float(np.mean([a.truncated for a in answers])),
    }
    if returns:
        every, guess = np.concatenate(returns), np.concatenate([a.old_values for a in answers])
        metrics["ppo/explained_variance"] = float(1 - np.var(every - guess) / np.var(every))
    return Result(metrics, advantages, logit_gradients, value_gradients)
