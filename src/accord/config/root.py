"""`Config`: all sections together, with interpolation, stage overrides and the rules between keys."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, ValidatorFunctionWrapHandler, model_validator

from accord.config.fields import Section
from accord.config.interpolate import interpolate
from accord.config.launch_sections import Launch
from accord.config.messages import Locations, Path, Refusal, refuse, validation_refusals
from accord.config.ppo_sections import PPO
from accord.config.sections import (
    DPO,
    SFT,
    STAGES,
    Checkpoint,
    Critic,
    Data,
    Engine,
    Eval,
    Export,
    Generate,
    Model,
    Pipeline,
    Reference,
    Reward,
    RewardModel,
    Run,
    StageName,
    Track,
    Train,
    as_sources,
)

DEFAULT_LR: dict[str, float] = {"sft": 1.0e-5, "reward": 5.0e-6, "dpo": 1.0e-6, "ppo": 1.0e-6}
LORA_LR_FACTOR = 10.0


@dataclass
class Origin:
    """Where a configuration came from: what its refusals are named after."""

    name: str
    stage: str | None
    locations: Locations
    override: dict[str, Any] = field(default_factory=dict)  # the part of `stages` that was merged in
    derived: set[Path] = field(default_factory=set)  # keys that only repeat another key's value

    def refuse(self, refusals: Iterable[Refusal]) -> None:
        """Raise ConfigError where there is a refusal; one of a derived key is left out where another says the same."""
        found = list(refusals)
        first_hand = [refusal for refusal in found if refusal.path not in self.derived]
        refuse([Refusal(self.written(r.path), r.why) for r in first_hand or found], self.locations)

    def written(self, path: Path) -> Path:
        """The key as it was written: below `stages.<stage>` where the override has it."""
        inside: Any = self.override
        for depth, part in enumerate(path):
            if not isinstance(inside, dict) or part not in inside:
                # a key that is missing in a section of the override belongs to that section
                return ("stages", self.stage, *path) if self.stage and depth > 1 and isinstance(inside, dict) else path
            inside = inside[part]
        return ("stages", self.stage, *path) if self.stage else path


class Config(Section):
    """One file, these sections; a stage reads the ones it needs.

    `Config(model={"path": …}, dpo={"beta": 0.2})` works in code; `load_config` reads files, presets and overrides.
    Raises `ConfigError` with every refused key.
    """

    run: Run = Field(default=Run(), description="Where a run lives and how it starts again.")
    model: Model = Field(default=Model(), description="The model that is trained (PPO's actor).")
    reference: Reference = Field(default=Reference(), description="The frozen model that DPO and the KL penalty compare with.")
    reward_model: RewardModel = Field(
        default=RewardModel(), description="What the stage reward starts from, and what PPO asks for scores."
    )
    critic: Critic = Field(default=Critic(), description="PPO's value function.")
    data: Data = Field(default=Data(), description="What is trained and evaluated on.")
    train: Train = Field(default=Train(), description="The optimizer and its schedule.")
    eval: Eval = Field(default=Eval(), description="When the held-out part is evaluated.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="When resumable state is saved.")
    export: Export = Field(default=Export(), description="When a loadable model is written during the run.")
    sft: SFT = Field(default=SFT(), description="Supervised fine-tuning.")
    reward: Reward = Field(default=Reward(), description="Reward model.")
    dpo: DPO = Field(default=DPO(), description="Direct preference optimisation.")
    ppo: PPO = Field(default=PPO(), description="Proximal policy optimisation.")
    generate: Generate = Field(default=Generate(), description="How answers are sampled.")
    engine: Engine = Field(default=Engine(), description="How it is computed: the Hybrid Engine.")
    launch: Launch = Field(default=Launch(), description="On how many processes and machines a training command runs.")
    pipeline: Pipeline = Field(default=Pipeline(), description="What `accord run` does.")
    stages: dict[StageName, dict[str, Any]] = Field(
        default={},
        description="Overrides of any section for one stage: {sft: {train: {lr: 2.0e-5}}, ppo: {model: {lora: null}}}.",
    )
    track: Track = Field(default=Track(), description="What is recorded beside metrics.jsonl.")

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)  # as given: interpolations and null learning rates still in place
    _origin: Origin = PrivateAttr(default_factory=lambda: Origin("accord", None, {}))

    @model_validator(mode="wrap")
    @classmethod
    def _resolve(cls, given: Any, handler: ValidatorFunctionWrapHandler, info: Any) -> Config:
        if isinstance(given, Config):
            return given
        context: Mapping[str, Any] = info.context or {}
        stage: str | None = context.get("stage")
        origin = Origin(context.get("name", "accord"), stage, context.get("locations", {}))
        raw = _fill_sections(plain(given))
        if stage is not None:
            raw, origin.override = apply_stage(raw, stage)
        filled, origin.derived = with_defaults(raw, origin.name)
        resolved, refusals = interpolate(filled)
        origin.refuse(refusals)
        if stage is not None:
            fill_learning_rate(resolved, stage)
            keep_sources_of(resolved, stage)
        try:
            config = cast(Config, handler(resolved))
        except ValidationError as error:
            origin.refuse(validation_refusals(error, resolved))
            raise
        config._raw, config._origin = raw, origin
        from accord.config import rules

        origin.refuse(rules.broken(config))
        return config

    @property
    def source_name(self) -> str:
        """The name of the file or preset this came from, as used in the default `run.dir`."""
        return self._origin.name

    @property
    def stage(self) -> str | None:
        """The stage that `for_stage` made this for, or None."""
        return self._origin.stage

    def for_stage(self, stage: str) -> Config:
        """The configuration of one stage: `stages.<stage>` applied, `train.lr` a number, sources of other stages left out."""
        if stage not in STAGES:
            raise ValueError(f"no such stage: {stage!r}; the stages are {', '.join(STAGES)}")
        if stage == self.stage:
            return self
        if self.stage is not None:
            raise ValueError(f"this configuration is already that of stage {self.stage}; take the one it was made from")
        return build(self._raw, name=self.source_name, stage=stage, locations=self._origin.locations)

    def updated(self, changes: Mapping[str, Any]) -> Config:
        """A copy with `changes` (nested mappings) merged in; what interpolates a changed key follows it."""
        raw = merge(self._raw, plain(changes))
        return build(raw, name=self.source_name, stage=self.stage, locations=self._origin.locations)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (dicts, lists, numbers, strings), every value resolved."""
        return self.model_dump(mode="json")


def build(raw: Mapping[str, Any], *, name: str, stage: str | None = None, locations: Locations | None = None) -> Config:
    """A `Config` from nested mappings, remembering its name and where each key was written."""
    return Config.model_validate(dict(raw), context={"name": name, "stage": stage, "locations": locations or {}})


def dump_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads again."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True, width=130)


def plain(value: Any) -> Any:
    """Sections → the keys that were set, mappings → dicts, tuples → lists, paths → strings; a deep copy."""
    if isinstance(value, Config):
        return copy.deepcopy(value._raw)
    if isinstance(value, BaseModel):
        return plain(
            {key: getattr(value, key) for key in value.model_fields_set}
            | ({"type": value.type} if hasattr(value, "type") else {})
        )
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, FilePath) else value


def merge(base: Any, over: Any) -> Any:
    """`over` wins; mappings are merged key by key, everything else (lists too) is replaced."""
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return copy.deepcopy(over)
    merged = {key: copy.deepcopy(value) for key, value in base.items() if key not in over}
    return {key: merge(base[key], over[key]) if key in over else merged[key] for key in base} | {
        key: copy.deepcopy(value) for key, value in over.items() if key not in base
    }


def _fill_sections(raw: Any) -> Any:
    """A section written without content (`train:` and nothing below) is an empty section."""
    if not isinstance(raw, dict):
        return raw
    return {key: {} if value is None and key in Config.model_fields else value for key, value in raw.items()}


def apply_stage(raw: dict[str, Any], stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge `stages.<stage>` into the sections and drop `stages`; also returns what was merged in."""
    stages = raw.get("stages") or {}
    override = stages.get(stage) if isinstance(stages, dict) else None
    rest = {key: value for key, value in raw.items() if key != "stages"}
    if not isinstance(override, dict):
        return rest, {}
    return _fill_sections(merge(rest, override)), override


def with_defaults(raw: Any, name: str) -> tuple[Any, set[Path]]:
    """Add the defaults that depend on other keys (those written `${…}`, and `run.dir`); also returns which keys were added."""
    if not isinstance(raw, dict):
        return raw, set()
    defaults: dict[str, dict[str, Any]] = {"run": {"dir": f"runs/{name}"}}
    for section, known in Config.model_fields.items():
        if isinstance(known.annotation, type) and issubclass(known.annotation, BaseModel):
            for key, inner in known.annotation.model_fields.items():
                if isinstance(inner.default, str) and inner.default.startswith("${"):
                    defaults.setdefault(section, {})[key] = inner.default
    written = {section: raw[section] for section in defaults if isinstance(raw.get(section), dict)}
    added = {(section, key) for section, keys in defaults.items() for key in keys if key not in written.get(section, {})}
    return merge(defaults, raw), cast("set[Path]", added)


def fill_learning_rate(resolved: dict[str, Any], stage: str) -> None:
    """`train.lr` null → the stage's default, ten times that with LoRA."""
    train, model = resolved.get("train", {}), resolved.get("model", {})
    if isinstance(train, dict) and train.get("lr") is None:
        with_lora = isinstance(model, dict) and model.get("lora") is not None
        resolved["train"] = {**train, "lr": DEFAULT_LR[stage] * (LORA_LR_FACTOR if with_lora else 1.0)}


def keep_sources_of(resolved: dict[str, Any], stage: str) -> None:
    """Leave out the sources that are tied to other stages."""
    data = resolved.get("data")
    if not isinstance(data, dict):
        return
    for part in ("train", "valid"):
        sources = as_sources(data.get(part))
        if isinstance(sources, list):
            kept = [s for s in sources if not _tied_elsewhere(s, stage)]
            data[part] = kept or None


def _tied_elsewhere(source: Any, stage: str) -> bool:
    stages = source.get("stages") if isinstance(source, dict) else None
    return isinstance(stages, list) and bool(stages) and set(stages) <= set(get_args(StageName)) and stage not in stages
