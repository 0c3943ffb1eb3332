"""Combinations that can't work, each refused by a function named as the rule, before anything is loaded.

A rule yields a `Refusal` for each key it refuses. Rules about one stage look at `config.stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from accord.config.critic_rules import CRITIC_RULES
from accord.config.launch_rules import LAUNCH_RULES
from accord.config.messages import Path, Refusal
from accord.config.ppo_rules import PPO_RULES
from accord.config.reward_rules import reward_refusals

if TYPE_CHECKING:
    from accord.config.root import Config

Rule = Callable[["Config"], Iterator[Refusal]]
LARGEST = (2 - 2**-23) * 2.0**127  # of float32
LARGEST_WHOLE = 2**63 - 1
RULES: list[Rule] = [*PPO_RULES, *CRITIC_RULES, *LAUNCH_RULES]


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def broken(config: Config) -> list[Refusal]:
    """Every refusal of every rule; numbers that nothing can be computed with come alone, for rules compute too."""
    too_large = list(numbers_are_computed_with(config.model_dump()))
    return too_large or [refusal for check in RULES for refusal in check(config)]


def numbers_are_computed_with(value: Any, path: Path = ()) -> Iterator[Refusal]:
    """Tensors are float32 and int64: a larger number stops the run in the middle of its first step."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_are_computed_with(item, (*path, key))
    elif type(value) is int and abs(value) > LARGEST_WHOLE:
        yield Refusal(path, f"too large: whole numbers go up to {LARGEST_WHOLE:,}.")
    elif type(value) is float and abs(value) > LARGEST:
        yield Refusal(path, f"{value:g} is too large: numbers go up to {LARGEST:.6g}, the largest of float32.")


@rule
def a_model_is_loaded_or_new(config: Config) -> Iterator[Refusal]:
    model = config.model
    if model.path is not None and model.from_scratch is not None:
        yield Refusal(
            ("model", "from_scratch"),
            "a model is either loaded (model.path) or new (model.from_scratch). Set one of them to null.",
        )
    if model.from_scratch is not None and model.lora is not None:
        yield Refusal(
            ("model", "lora"), "adapters on random frozen weights learn nothing. Set model.lora=null or give model.path."
        )
    if model.from_scratch is not None and model.revision is not None:
        yield Refusal(("model", "revision"), "a new model has no revision. Remove it.")


@rule
def four_bits_are_for_a_frozen_base(config: Config) -> Iterator[Refusal]:
    model = config.model
    if model.quantization is None:
        return
    if model.lora is None:
        yield Refusal(
            ("model", "quantization"),
            f"{model.quantization} is for the frozen base of adapters, and all weights are trained here. Set model.lora "
            "({} takes the defaults), or leave it out.",
        )
    if config.train.shard == "always":
        yield Refusal(
            ("train", "shard"),
            "a base in 4 bits (model.quantization) is not divided, every process holds it whole. Set train.shard=never, or "
            "model.quantization=null.",
        )
    if find_spec("bitsandbytes") is None:
        yield Refusal(
            ("model", "quantization"),
            f"{model.quantization} needs the package bitsandbytes. Run: pip install 'accord[quantization]', or leave it out.",
        )


@rule
def heads_divide_the_width(config: Config) -> Iterator[Refusal]:
    new = config.model.from_scratch
    if new is None:
        return
    if new.hidden_size % new.num_heads:
        yield Refusal(
            ("model", "from_scratch", "num_heads"), f"{new.num_heads} heads do not divide hidden_size {new.hidden_size}."
        )
    if new.num_kv_heads is not None and new.num_heads % new.num_kv_heads:
        yield Refusal(
            ("model", "from_scratch", "num_kv_heads"),
            f"{new.num_kv_heads} key-value heads do not divide num_heads {new.num_heads}.",
        )


@rule
def a_sequence_fits_a_pack(config: Config) -> Iterator[Refusal]:
    length, budget = config.data.max_length, config.train.max_tokens
    if length > budget:
        yield Refusal(
            ("train", "max_tokens"),
            f"a pack of {budget:,} tokens can't hold a sequence of data.max_length {length:,}. "
            f"Raise train.max_tokens to {length} or lower data.max_length to {budget}.",
        )
    elif config.stage == "ppo" and length + config.generate.max_new_tokens > budget:
        needed = length + config.generate.max_new_tokens
        yield Refusal(
            ("train", "max_tokens"),
            f"a prompt of data.max_length {length:,} and an answer of generate.max_new_tokens {config.generate.max_new_tokens:,} "
            f"need {needed:,} tokens, a pack has {budget:,}. Raise train.max_tokens to {needed} or lower the other two.",
        )


@rule
def the_shortest_answer_is_not_longer_than_the_longest(config: Config) -> Iterator[Refusal]:
    generate = config.generate
    if generate.min_new_tokens > generate.max_new_tokens:
        yield Refusal(
            ("generate", "min_new_tokens"),
            f"{generate.min_new_tokens} is more than generate.max_new_tokens {generate.max_new_tokens}.",
        )


@rule
def label_smoothing_is_for_sigmoid_and_robust(config: Config) -> Iterator[Refusal]:
    dpo = config.dpo
    if not {"sigmoid", "robust"} & dpo.mix.keys() and dpo.label_smoothing > 0:
        name = f"the {dpo.loss_type} loss" if dpo.loss_weights is None else f"a mix of {', '.join(dpo.mix)}"
        yield Refusal(
            ("dpo", "label_smoothing"),
            f"{name} has no label smoothing. Set it to 0, or use dpo.loss_type=sigmoid or robust.",
        )


@rule
def robust_needs_a_share_of_swapped_labels(config: Config) -> Iterator[Refusal]:
    if "robust" in config.dpo.mix and config.dpo.label_smoothing == 0:
        yield Refusal(
            ("dpo", "label_smoothing"),
            "at 0 robust is the sigmoid loss. Set it to the share of labels that may be swapped, such as 0.1, "
            "or use dpo.loss_type=sigmoid.",
        )


@rule
def a_setting_of_one_dpo_loss_is_for_that_loss(config: Config) -> Iterator[Refusal]:
    dpo = config.dpo
    for key, loss_type in (
        ("simpo_gamma", "simpo"),
        ("orpo_lambda", "orpo"),
        ("desirable_weight", "kto"),
        ("undesirable_weight", "kto"),
    ):
        if dpo.loss_type != loss_type and getattr(dpo, key) != type(dpo).model_fields[key].default:
            yield Refusal(
                ("dpo", key), f"does nothing with dpo.loss_type={dpo.loss_type}. Leave it out, or use dpo.loss_type={loss_type}."
            )
    for key in ("beta", "beta_end"):
        if dpo.loss_type == "orpo" and getattr(dpo, key) != type(dpo).model_fields[key].default:
            yield Refusal(
                ("dpo", key), "does nothing with dpo.loss_type=orpo. Leave it out; dpo.orpo_lambda weighs the odds ratio."
            )
    if dpo.loss_type == "kto" and dpo.rpo_alpha is not None:
        yield Refusal(("dpo", "rpo_alpha"), "is for pairs: kto's answers have no chosen one. Leave it out.")


@rule
def a_mix_of_dpo_losses_is_a_mix(config: Config) -> Iterator[Refusal]:
    dpo = config.dpo
    if dpo.loss_weights is None:
        return
    if dpo.loss_type != type(dpo).model_fields["loss_type"].default:
        yield Refusal(
            ("dpo", "loss_type"), f"dpo.loss_weights takes its place: {dpo.loss_type} would not be used. Leave one of them out."
        )
    if not dpo.loss_weights:
        yield Refusal(("dpo", "loss_weights"), "is empty. Name the losses, such as {sigmoid: 0.8, ipo: 0.2}, or leave it out.")


@rule
def a_schedule_of_beta_has_an_end(config: Config) -> Iterator[Refusal]:
    dpo = config.dpo
    if dpo.beta_end is None and dpo.beta_schedule != type(dpo).model_fields["beta_schedule"].default:
        yield Refusal(("dpo", "beta_schedule"), "β goes nowhere without dpo.beta_end. Set it, or leave the schedule out.")


@rule
def kto_compares_within_a_step(config: Config) -> Iterator[Refusal]:
    if config.stage != "dpo" or config.dpo.loss_type != "kto":
        return
    if config.train.batch_size < 2:
        yield Refusal(
            ("train", "batch_size"),
            "kto measures its reference point on other examples of the step: one alone has none. Use 2 or more.",
        )
    if config.reference.precompute:
        yield Refusal(
            ("reference", "precompute"),
            "kto asks the reference about answers of other examples, other ones in every step. Set it to false.",
        )


@rule
def the_reference_is_computed_once_for_dpo(config: Config) -> Iterator[Refusal]:
    if config.stage == "ppo" and config.reference.precompute:
        yield Refusal(
            ("reference", "precompute"),
            "PPO's answers are new in every step: nothing can be computed before. Set it to false (in a pipeline give it to its stage: "
            "stages.dpo.reference.precompute=true).",
        )


@rule
def a_loss_without_a_reference_is_given_none(config: Config) -> Iterator[Refusal]:
    if config.stage != "dpo" or config.dpo.needs_reference:
        return
    reference, model = config.reference, config.model
    for key, differs in (
        ("path", reference.path not in (None, model.path)),
        ("dtype", reference.dtype != model.dtype),
        ("precompute", reference.precompute),
    ):
        if differs:  # PPO's stage of a pipeline may have use for all but precompute
            elsewhere = "" if key == "precompute" else f" (in a pipeline give it to its stage: stages.ppo.reference.{key})"
            yield Refusal(
                ("reference", key),
                f"does nothing with dpo.loss_type={config.dpo.loss_type}, which needs no reference. Leave it out{elsewhere}, "
                "or use dpo.loss_type=sigmoid.",
            )


@rule
def centring_is_for_pairs(config: Config) -> Iterator[Refusal]:
    if config.reward.loss_type == "mse" and config.reward.center_coefficient > 0:
        yield Refusal(("reward", "center_coefficient"), "centring acts on pairs, mse learns from single scores. Set it to 0.")


@rule
def sampling_in_lockstep_is_one_way_or_another(config: Config) -> Iterator[Refusal]:
    engine = config.engine
    split, by_groups = engine.inference_tp_size > 1, not engine.pin_parameters
    if split and by_groups:
        yield Refusal(
            ("engine", "pin_parameters"),
            f"false does nothing with engine.inference_tp_size={engine.inference_tp_size}: each process keeps its part of the layers. "
            "Leave it true, or set engine.inference_tp_size=1.",
        )
    split = split or config.launch.mesh.tensor > 1
    if not (split or by_groups) and engine.tp_gather_partition_size != 8:
        yield Refusal(
            ("engine", "tp_gather_partition_size"),
            f"{engine.tp_gather_partition_size} does nothing while all weights are gathered at once. Leave it out, or set "
            "engine.pin_parameters=false or engine.inference_tp_size.",
        )
    if (split or by_groups) and engine.enable_cuda_graph:
        yield Refusal(
            ("engine", "enable_cuda_graph"),
            "a step that several processes take together is not recorded. Set it to false, or leave engine.pin_parameters and "
            "engine.inference_tp_size out.",
        )


@rule
def what_is_off_has_no_settings(config: Config) -> Iterator[Refusal]:
    engine = config.engine
    if engine.enabled:
        return
    for key in (
        "max_slots", "max_out_tokens", "release_inference_cache", "enable_cuda_graph",
        "inference_tp_size", "pin_parameters", "tp_gather_partition_size",
    ):  # fmt: skip
        if getattr(engine, key) != type(engine).model_fields[key].default:
            yield Refusal(("engine", key), "does nothing with engine.enabled=false. Leave it out, or set engine.enabled=true.")


@rule
def every_source_of_scores_can_score(config: Config) -> Iterator[Refusal]:
    yield from reward_refusals(config.ppo.rewards)


@rule
def the_best_model_needs_its_metric(config: Config) -> Iterator[Refusal]:
    metric = config.eval.best_metric
    if metric is None:
        return
    prefix = metric.partition("/")[0]
    known = ("sft", "reward", "dpo", "ppo")
    if "/" not in metric or prefix not in known:
        yield Refusal(
            ("eval", "best_metric"),
            f"{metric!r} is no metric of a stage. Names look like dpo/reward_accuracy, sft/loss, ppo/score.",
        )
    elif config.stage is not None and prefix != config.stage:
        yield Refusal(
            ("eval", "best_metric"),
            f"stage {config.stage} has no metric {metric}. In a pipeline set it for its stage: stages.{prefix}.eval.best_metric={metric}.",
        )


@rule
def stages_run_in_an_order_that_hands_on(config: Config) -> Iterator[Refusal]:
    stages = list(config.pipeline.stages)
    if len(set(stages)) < len(stages):
        yield Refusal(("pipeline", "stages"), f"a stage runs once; {stages} names one twice.")
    order = {"sft": 0, "reward": 1, "dpo": 2, "ppo": 2}
    ranks = [order[stage] for stage in stages]
    if ranks != sorted(ranks):
        yield Refusal(
            ("pipeline", "stages"),
            "a later stage starts from an earlier one's model: the order is sft, reward, then dpo and ppo.",
        )


@rule
def a_judge_needs_prompts(config: Config) -> Iterator[Refusal]:
    pipeline = config.pipeline
    if (pipeline.judge is None) != (pipeline.judge_prompts is None):
        missing = "judge" if pipeline.judge is None else "judge_prompts"
        yield Refusal(("pipeline", missing), "pipeline.judge and pipeline.judge_prompts go together. Give both or neither.")


@rule
def an_alarm_is_above_what_the_kl_controller_steers_to(config: Config) -> Iterator[Refusal]:
    kl, alarms = config.ppo.kl, config.ppo.alarms
    if kl.controller == "adaptive" and alarms.kl is not None and alarms.kl <= kl.target:
        yield Refusal(
            ("ppo", "alarms", "kl"),
            f"{alarms.kl:g} is not above ppo.kl.target {kl.target:g}, which the controller steers to. Raise it to {2 * kl.target:g}, "
            "or set it to null.",
        )


@rule
def a_judge_that_chooses_the_best_model_is_named(config: Config) -> Iterator[Refusal]:
    if config.eval.best_metric == "ppo/judge" and config.ppo.judge is None:
        yield Refusal(("eval", "best_metric"), "ppo/judge is not measured without a judge. Set ppo.judge, or choose ppo/score.")


@rule
def an_alarm_setting_has_its_alarm(config: Config) -> Iterator[Refusal]:
    ppo, alarms = config.ppo, config.ppo.alarms

    def is_default(key: str) -> bool:
        return getattr(alarms, key) == type(alarms).model_fields[key].default

    if ppo.judge is None and alarms.judge is not None and not is_default("judge"):
        yield Refusal(("ppo", "alarms", "judge"), "does nothing without a judge. Set ppo.judge, or leave it out.")
    if ppo.on_alarm != "lower_lr" and not is_default("lr_floor"):
        yield Refusal(
            ("ppo", "alarms", "lr_floor"),
            f"does nothing with ppo.on_alarm={ppo.on_alarm}. Leave it out, or set ppo.on_alarm=lower_lr.",
        )
    for key in ("kl_growth_window", "kl_growth_from"):
        if alarms.kl_growth is None and not is_default(key):
            yield Refusal(("ppo", "alarms", key), "does nothing with ppo.alarms.kl_growth=null. Leave it out.")


@rule
def a_stage_does_not_move_the_run(config: Config) -> Iterator[Refusal]:
    for stage, sections in config.stages.items():
        for key in ("pipeline", "launch", "stages", "extends"):
            if key in sections:
                yield Refusal(("stages", stage, key), "this belongs to the whole run, not to one stage.")
        run = sections.get("run")
        for key in ("dir", "resume", "overwrite"):
            if isinstance(run, dict) and key in run:
                yield Refusal(("stages", stage, "run", key), "this belongs to the whole run, not to one stage.")


def missing_for_stage(config: Config, *, first: bool = True, has_reward_model: bool = False) -> Iterator[Refusal]:
    """What a stage can't start without, when it is started from the command line.

    `first` is False for a stage of a pipeline that gets its model from an earlier one, `has_reward_model` True where an earlier
    stage makes the reward model.
    """
    stage, model = config.stage, config.model
    loads = config.reward_model.path if stage == "reward" else None
    if first and model.path is None and model.from_scratch is None and loads is None:
        yield Refusal(
            ("model", "path"),
            "is needed: a model folder, a hub id, a run or a .gguf file. Or describe a new one in model.from_scratch.",
        )
    if config.data.train is None:
        yield Refusal(
            ("data", "train"), f"is needed: no source has rows for stage {stage}. Give a path, a hub id, or a list of sources."
        )
    asks_model = any(source.type == "model" for source in config.ppo.rewards)
    if stage == "ppo" and asks_model and config.reward_model.path is None and not has_reward_model:
        yield Refusal(
            ("reward_model", "path"),
            "is needed: PPO asks it for scores. Train one with `accord reward`, or score with a function: "
            "ppo.rewards=[{type: function, path: module:function}].",
        )


def missing_for_pipeline(config: Config) -> Iterator[Refusal]:
    """What the stages of `accord run` can't start without, beside what they hand on to each other.

    A stage that an earlier call has finished in the same run hands on its model too.
    """
    stages = config.pipeline.stages
    done = {stage for stage in ("sft", "reward") if (FilePath(config.run.dir) / stage / "summary.json").is_file()}
    for stage in stages:
        has_sft = stage != "sft" and "sft" in {*stages, *done}
        yield from missing_for_stage(config.for_stage(stage), first=not has_sft, has_reward_model="reward" in {*stages, *done})
