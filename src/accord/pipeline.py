"""The stages of one run, each with what the one before it left (ARCHITECTURE §5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.errors import ConfigError
from accord.track.files import json_line, write_atomically
from accord.track.run import RunFolder, read_summary

if TYPE_CHECKING:
    from accord.config import Config
    from accord.engine.ranks import Ranks

Say = Callable[[str], None]


def train_stage(stage: str, config: Config, say: Say = print) -> dict[str, Any]:
    """Run one stage in `config.run.dir`, or go on with it; a finished one is left as it is. Returns its summary."""
    from accord.engine.ranks import together
    from accord.trainers.loop import open_together

    config = config.for_stage(stage)
    with together() as ranks:
        say = say if ranks.is_main else _nothing
        run = open_together(config, stage, Path(config.run.dir))
        if run.state == "finished":
            say(f"{stage}: finished already in {run.folder} (run.overwrite=true does it again)")
            return ranks.ask_main(run.summary) or {}
        with run, _trainer(stage)(config) as trainer:
            say(trainer.examples.report.summary())
            return trainer.train(run)


def _nothing(text: str) -> None:
    """What a process says that is not the main one of its group."""


def _trainer(stage: str) -> Any:
    if stage == "sft":
        from accord.trainers.sft import SFTTrainer

        return SFTTrainer
    if stage == "reward":
        from accord.trainers.reward import RewardTrainer

        return RewardTrainer
    if stage == "dpo":
        from accord.trainers.preference import DPOTrainer

        return DPOTrainer
    from accord.trainers.ppo import PPOTrainer

    return PPOTrainer


@dataclass
class PipelineResult:
    """What `run_pipeline` leaves behind."""

    folder: Path
    summaries: dict[str, dict[str, Any]]
    judged: list[Any] = field(default_factory=list)  # judging.Judged, in the order of the stages


def run_pipeline(config: Config, say: Say = print) -> PipelineResult:
    """The stages of `pipeline.stages`, one after the other, in RUN/<stage>; finished ones are not done again.

    The reward model and DPO start from the SFT model, PPO's actor and reference are the SFT model, its scores come from the reward
    model and its critic starts there. A stage that was finished earlier in the same RUN hands on its output though it is not listed.
    All stages' configurations are checked before the first one starts.
    """
    from accord.engine.ranks import together

    with together() as ranks:
        return _run_stages(config, say if ranks.is_main else _nothing, ranks)


def _run_stages(config: Config, say: Say, ranks: Ranks) -> PipelineResult:
    from accord.trainers.loop import open_together

    folder = Path(config.run.dir)
    stages: list[str] = list(config.pipeline.stages)
    for stage in stages:
        _check(stage, stage_config(config, stage, folder, planned=stages))
    run = open_together(config, "pipeline", folder)
    if run.state == "finished" and all(read_summary(folder / stage) is not None for stage in stages):
        say(f"finished already in {folder} (run.overwrite=true does it again)")
        return PipelineResult(folder, _earlier(folder, []), _judged_before(run.summary() or {}))
    _check_functions(config, [stage for stage in stages if read_summary(folder / stage) is None])
    with run:
        ranks.ask_main(run.begin)
        summaries = {}
        for stage in stages:
            say(f"\n── {stage} " + "─" * 60)
            summaries[stage] = train_stage(stage, stage_config(config, stage, folder), say)
        result = PipelineResult(folder, {**_earlier(folder, stages), **summaries})
        ranks.ask_main(lambda: _finish(config, run, result, say))
    return result


def _finish(config: Config, run: RunFolder, result: PipelineResult, say: Say) -> None:
    """Judge what the stages have left, and write the pipeline's summary."""
    folder = result.folder
    summary: dict[str, Any] = {"stages": result.summaries}
    if config.pipeline.judge:
        from accord.judging import judge_models

        models: dict[str, Path] = {
            stage: folder / stage / "model" for stage in ("sft", "dpo", "ppo") if stage in result.summaries
        }
        if models:
            say("\n── judge " + "─" * 60)
            result.judged = judge_models(config, models)
            _keep_answers(folder, result.judged)
            summary["judge"] = {judged.name: judged.score for judged in result.judged}
            summary["judge_details"] = {judged.name: judged.as_dict() for judged in result.judged}
    run.finish(summary)


def _keep_answers(folder: Path, judged: list[Any]) -> None:
    """RUN/samples.jsonl: every model's answers to the same prompts, for the report."""
    rows = [{"stage": row.name, **answer} for row in judged for answer in row.answers]
    write_atomically(folder / "samples.jsonl", b"".join(json_line(row) for row in rows))


def _judged_before(summary: dict[str, Any]) -> list[Any]:
    """The table of a pipeline that was finished earlier."""
    from accord.judging import Judged

    return [Judged(name, **details, answers=[]) for name, details in (summary.get("judge_details") or {}).items()]


def stage_config(config: Config, stage: str, folder: Path, planned: list[str] | None = None) -> Config:
    """The configuration of one stage of a pipeline: its own folder, and its models where earlier stages have left them.

    With `planned`, stages that are still to run count as finished.
    """

    def left_by(earlier: str) -> str | None:
        finished = read_summary(folder / earlier) is not None or (planned is not None and earlier in planned)
        return str(folder / earlier / "model") if finished else None

    changes: dict[str, Any] = {"run": {"dir": str(folder / stage)}}
    policy = left_by("sft") if stage != "sft" else None
    if policy:
        changes["model"] = {"path": policy, "from_scratch": None}
        if config.model.lora is not None and config.model.lora.path is not None:
            changes["model"]["lora"] = {"path": None}  # that adapter is merged into the SFT model already
    if stage == "ppo" and (reward := left_by("reward")):
        changes["reward_model"] = {"path": reward}
    return config.updated(changes).for_stage(stage)


def _check(stage: str, config: Config) -> None:
    """What can be refused before the first stage spends an hour."""
    if config.data.train is None:
        raise ConfigError(
            f"data.train: stage {stage} has no data. Name a file, a folder or a hub id, or tie a source to it with stages: [{stage}]."
        )
    if stage == "ppo" and config.reward_model.path is None and any(source.type == "model" for source in config.ppo.rewards):
        raise ConfigError(
            "reward_model.path: stage ppo asks a reward model for scores, but none is named and none is trained. Add reward to pipeline.stages or set reward_model.path."
        )


def _check_functions(config: Config, stages: list[str]) -> None:
    """Make what scores at the very end (or in the last stage) and needs no model, before the first stage spends an hour."""
    from accord.rewards.function import FunctionReward
    from accord.trainers.ppo_rewards import check_sources

    if config.pipeline.judge is not None:
        FunctionReward(config.pipeline.judge, key="pipeline.judge")
    if "ppo" in stages:
        check_sources(config.for_stage("ppo"))
        if (judge := config.for_stage("ppo").ppo.judge) is not None:
            FunctionReward(judge, key="ppo.judge")


def _earlier(folder: Path, stages: list[str]) -> dict[str, dict[str, Any]]:
    """Summaries of stages that an earlier call finished in the same folder."""
    found = {}
    for stage in ("sft", "reward", "dpo", "ppo"):
        if stage not in stages and (summary := read_summary(folder / stage)) is not None:
            found[stage] = summary
    return found
