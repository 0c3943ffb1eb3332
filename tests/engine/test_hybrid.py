"""The Hybrid Engine: what is trained is what samples, its settings are obeyed, and the time of an iteration adds up."""

from __future__ import annotations

import math

import pytest
import torch

from accord.config.sections import Engine
from accord.engine import hybrid
from accord.engine.generate import DecoderGenerator, PlainGenerator, SamplingParams, make_generator
from accord.engine.hybrid import HybridEngine, TimeSplit
from accord.errors import ConfigError
from tests.engine.decoder_setup import greedy_of, ragged, tiny
from tests.trainers.ppo_setup import settings, trainer

PROMPTS = ragged((4, 11))
GREEDY = SamplingParams(max_new_tokens=10, temperature=0)


@pytest.fixture
def make(tiny_folder, tmp_path):
    """`make({"engine": {…}})` → a PPOTrainer on a tiny Llama."""
    return lambda changes=None: trainer(tiny_folder("llama"), tmp_path / "run", changes)


def tokens(engine: HybridEngine) -> list[list[int]]:
    return [rollout.token_ids for rollout in engine.generate(PROMPTS, GREEDY)]


# -- trained = sampled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, {"release_inference_cache": True}, {"enabled": False}], ids=str)
def test_answers_follow_every_step(make, engine):
    model = (ppo := make({"engine": engine})).policy
    before = tokens(ppo.engine)
    assert before == greedy_of(model.module, PROMPTS, 10)
    for sign in (1, -1):
        batch = torch.tensor(ragged((20,)))
        model.backward(sign * 30 * model.module(batch, labels=batch).loss)
        for group in model.optimizer.param_groups:
            group["lr"] = 0.02
        model.peak_lr = 0.02
        assert not ppo.engine.step().skipped
        now = tokens(ppo.engine)
        assert now == greedy_of(model.module, PROMPTS, 10) != before
        before = now
    assert ppo.engine.step().skipped  # no gradient
    assert tokens(ppo.engine) == before


def test_the_trained_models_own_step_and_its_average_are_followed_without_the_engine(make):
    ppo = make({"train": {"ema_decay": 0.5, "lr": 0.02}})
    model, batch = ppo.policy, torch.tensor(ragged((20,)))
    start = tokens(ppo.engine)
    model.backward(model.module(batch, labels=batch).loss)
    model.step()
    after = tokens(ppo.engine)
    assert after == greedy_of(model.module, PROMPTS, 10) != start
    with model.with_ema():
        averaged = tokens(ppo.engine)
        assert averaged == greedy_of(model.module, PROMPTS, 10)
    assert tokens(ppo.engine) == after


def test_training_mode_is_as_it_was_and_can_be_switched(make):
    ppo = make()
    module = ppo.policy.module
    assert module.training
    tokens(ppo.engine)
    assert module.training
    ppo.engine.eval()
    tokens(ppo.engine)
    assert not any(part.training for part in module.modules())
    ppo.engine.train()
    assert all(part.training for part in module.modules())


# -- settings ---------------------------------------------------------------------------------------------------------------


def test_max_slots_is_what_is_under_way_at_once():
    rows = {}
    for slots in (1, 3, "auto"):
        generator = make_generator(tiny("llama"), None, Engine(max_slots=slots))
        inner, rows[slots] = generator.forward, []
        generator.forward = lambda step, cache, inner=inner, rows=rows[slots]: rows.append(step.decoding) or inner(step, cache)
        generator.generate(ragged((3, 4, 5, 6, 7)), GREEDY)
    assert {slots: max(seen) for slots, seen in rows.items()} == {1: 1, 3: 3, "auto": 5}


def test_dtype_is_the_trainers_or_what_is_asked_for():
    module = tiny("llama")
    assert make_generator(module, None, Engine()).dtype == torch.float32
    assert make_generator(module, None, Engine(), torch.bfloat16).dtype == torch.bfloat16
    assert make_generator(module, None, Engine(dtype="bfloat16")).dtype == torch.bfloat16
    asked = make_generator(module, None, Engine(dtype="float32"), torch.bfloat16)
    assert asked.dtype == asked.decoder.dtype == asked.cache.dtype == torch.float32
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_a_decoder_in_another_type_than_the_weights_is_a_decoder():
    for weights, computed in ((torch.bfloat16, "float32"), (torch.bfloat16, "auto"), (torch.float32, "bfloat16")):
        generator = make_generator(tiny("llama").to(weights), None, Engine(dtype=computed))
        assert generator.decoder is not None, (weights, computed, generator.reason)


def test_enabled_false_is_the_plain_path():
    generator = make_generator(tiny("llama"), None, Engine(enabled=False))
    assert type(generator) is PlainGenerator
    assert type(make_generator(tiny("llama"), None, Engine())) is DecoderGenerator
    assert [rollout.token_ids for rollout in generator.generate(PROMPTS, GREEDY)] == greedy_of(generator.module, PROMPTS, 10)


def test_release_inference_cache_keeps_nothing_between_calls():
    keeping = make_generator(tiny("llama"), None, Engine())
    freeing = make_generator(tiny("llama"), None, Engine(release_inference_cache=True))
    for _ in range(2):
        assert keeping.generate(PROMPTS, GREEDY) == freeing.generate(PROMPTS, GREEDY)
        assert freeing.nbytes == 0 < keeping.nbytes
        assert all(part.weight is None for part in freeing.decoder._projections())
    with pytest.raises(KeyboardInterrupt):
        freeing.generate(PROMPTS, GREEDY, on_token=interrupt)
    assert freeing.nbytes == 0


def interrupt(number: int, token: int) -> None:
    raise KeyboardInterrupt


def test_max_out_tokens_is_the_limit(make):
    generator = make_generator(tiny("llama"), None, Engine(max_out_tokens=15))
    assert generator.context_length == 15
    with pytest.raises(ConfigError, match=r"engine.max_out_tokens is 15. Lower generate.max_new_tokens to 4"):
        generator.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    "engine,match",
    [
        (
            {"inference_tp_size": 2, "pin_parameters": False},
            r"engine.pin_parameters.*does nothing with engine.inference_tp_size=2",
        ),
        (
            {"tp_gather_partition_size": 4},
            r"engine.tp_gather_partition_size.*does nothing while all weights are gathered at once",
        ),
        ({"pin_parameters": False, "enable_cuda_graph": True}, r"engine.enable_cuda_graph.*is not recorded"),
        ({"enabled": False, "inference_tp_size": 2}, r"engine.inference_tp_size.*does nothing with engine.enabled=false"),
    ],
)
def test_sampling_in_lockstep_is_one_way_or_another(tiny_folder, tmp_path, engine, match):
    with pytest.raises(ConfigError, match=match):
        settings(tiny_folder("llama"), tmp_path, {"engine": engine})


@pytest.mark.parametrize(
    "engine,match",
    [
        ({"pin_parameters": False}, r"engine.pin_parameters=false.*every process holds the whole model.*train.shard=always"),
        ({"inference_tp_size": 2}, r"engine.inference_tp_size=2 does not divide the number of processes, 1.*start 2 processes"),
    ],
)
def test_one_process_samples_with_nobody_in_lockstep(make, engine, match):
    with pytest.raises(ConfigError, match=match):
        make({"engine": engine})


def test_settings_of_an_engine_that_is_off_are_refused(tiny_folder, tmp_path):
    for key, value in (("max_slots", 3), ("max_out_tokens", 50), ("release_inference_cache", True), ("enable_cuda_graph", True)):
        with pytest.raises(ConfigError, match=f"engine.{key}.*does nothing with engine.enabled=false"):
            settings(tiny_folder("llama"), tmp_path, {"engine": {"enabled": False, key: value}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it could")
def test_cuda_graphs_need_a_gpu():
    with pytest.raises(ConfigError, match=r"enable_cuda_graph.*GPU"):
        make_generator(tiny("llama"), None, Engine(enable_cuda_graph=True))


# -- time -------------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when told to."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_the_parts_of_an_iteration_and_the_rest_add_up_to_it(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hybrid, "time", clock)
    times = TimeSplit()
    for scale in (1, 2):
        clock.now += 17  # between iterations
        times.start()
        for part, seconds in (("generate", 3.0), ("score", 0.5), ("logprob", 1.0), ("generate", 2.0)):
            with times(part):
                clock.now += scale * seconds
        times.add("train", scale * 2.0)
        clock.now += scale * 3.5  # 2 of training and 1.5 of something else
        metrics = times.close(samples=6)
        assert metrics["time/generate"] == scale * 5 and metrics["time/train"] == scale * 2
        assert metrics["time/gather"] == 0 and metrics["time/other"] == pytest.approx(scale * 1.5)
        assert metrics["time/step"] == scale * 10
        assert metrics["throughput/samples_per_s"] == 6 / (scale * 10)
    assert metrics["throughput/samples_per_s_average"] == pytest.approx(12 / 30)


def test_a_part_that_fails_is_counted_too(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hybrid, "time", clock)
    times = TimeSplit()
    times.start()
    with pytest.raises(ZeroDivisionError), times("score"):
        clock.now += 4
        1 / 0  # noqa: B018
    assert times.close(1)["time/score"] == 4


def test_ppo_reports_a_time_split_that_adds_up(make):
    ppo = make({"engine": {"dtype": "bfloat16"}})
    for step in (1, 2):
        metrics = ppo.step(step)
        parts = {name: seconds for name, seconds in metrics.items() if name.startswith("time/") and name != "time/step"}
        assert parts.keys() == {f"time/{part}" for part in (*hybrid.PARTS, "other")}
        assert all(seconds >= 0 for seconds in parts.values())
        assert sum(parts.values()) == pytest.approx(metrics["time/step"], rel=1e-6)
        assert min(metrics[f"time/{part}"] for part in ("generate", "logprob", "train")) > 0
        assert metrics["throughput/samples_per_s"] == pytest.approx(4 / metrics["time/step"])
    assert metrics["time/gather"] > 0  # the second time the copies were out of date


# -- PPO with another sampler than trainer ----------------------------------------------------------------------------------


def logprobs_of_responses(ppo, experience) -> list[torch.Tensor]:
    """log π of every response's tokens by the module's own forward, with gradient, [tokens] float64 each."""
    out = []
    for sample in experience.rollouts.samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logits = ppo.policy.module(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].double()
        chosen = ids[0, len(sample.prompt_ids) :, None]
        out.append((logits / ppo.params.temperature).log_softmax(-1).gather(1, chosen)[:, 0])
    return out


def prompts_of(ppo):
    return [ppo.examples.train[i] for i in range(len(ppo.examples.train))]


@pytest.mark.parametrize("clip", [1.004, 100.0])
def test_with_the_samplers_log_probabilities_tokens_count_by_a_clipped_importance(make, clip):
    """weights = min(π_old / π_sampler, is_clip) / N, in the experience and in the gradient."""
    ppo = make(
        {"engine": {"dtype": "bfloat16"}, "ppo": {"old_logprobs": "sampler", "is_clip": clip}, "generate": {"temperature": 0.8}}
    )
    experience = ppo.make_experience(prompts_of(ppo))
    new = logprobs_of_responses(ppo, experience)
    old, sampler = torch.cat(new).detach(), experience.rollouts.sampler_logprobs.double()
    importance = (old - sampler).exp().clamp(max=clip)
    assert torch.allclose(experience.importance.double(), importance, atol=1e-5)
    assert float((importance - 1).abs().max()) > 1e-3  # bfloat16 does sample from another distribution
    assert (float(importance.max()) == clip) == (clip < 2)
    assert experience.metrics["ppo/importance_weight"] == pytest.approx(float(importance.mean()), abs=1e-5)
    assert experience.metrics["ppo/sampler_logp_diff_max"] == pytest.approx(float((old - sampler).abs().max()), abs=1e-4)

    batch = experience.rollouts.minibatch(range(len(experience)), 256)
    ppo.updater.policy_gradient(experience, batch, ppo.kl_controller.coef)
    got = {name: parameter.grad.clone() for name, parameter in ppo.policy.parameters.items()}
    ppo.policy.discard_gradients()
    # ρ = 1 before the first update: the surrogate's gradient is that of -Σ w A log π.
    (-(importance / len(old) * experience.advantages.double() * torch.cat(new)).sum()).backward()
    for name, parameter in ppo.policy.parameters.items():
        assert torch.allclose(got[name], parameter.grad, atol=1e-5 * max(1.0, float(parameter.grad.abs().max()))), name


def test_recomputed_log_probabilities_need_no_importance(make):
    ppo = make({"engine": {"dtype": "bfloat16"}})
    experience = ppo.make_experience(prompts_of(ppo))
    assert experience.importance is None and "ppo/importance_weight" not in experience.metrics
    old = torch.cat(logprobs_of_responses(ppo, experience)).detach()
    assert torch.allclose(experience.old_logprobs.double(), old, atol=1e-5)


def test_ppo_with_the_samplers_log_probabilities_trains(make):
    ppo = make({"engine": {"dtype": "bfloat16", "release_inference_cache": True}, "ppo": {"old_logprobs": "sampler"}})
    for step in (1, 2, 3):
        metrics = ppo.step(step)
        assert 0.9 < metrics["ppo/importance_weight"] < 1.1
        assert 0 < metrics["ppo/sampler_logp_diff_max"] < 0.5 and math.isfinite(metrics["ppo/policy_loss"])
    assert ppo.engine.generator.nbytes == 0
