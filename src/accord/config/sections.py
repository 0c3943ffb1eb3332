"""The configuration's sections: one small, strict, frozen class each. The description is the documentation, the type is the check.

Nothing here imports torch. A default written `${a.b}` is the value of that other key; `Config` resolves it.
What depends on two keys is checked in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, Strict

from accord.config.fields import Count, Dtype, FunctionPath, Natural, NonNegative, Positive, ProperShare, Section, Share, Text

StageName = Literal["sft", "reward", "dpo", "ppo"]
STAGES: tuple[StageName, ...] = ("sft", "reward", "dpo", "ppo")
FormatName = Literal[
    "messages", "hh", "alpaca", "sharegpt", "chatllama", "rm-static", "ultrafeedback", "shp", "webgpt", "summarize", "text"
]


# ------------------------------------------------------------------------------------------------------------------ run and model


class Run(Section):
    """Where a run lives and how it starts again."""

    dir: Text = Field(default="runs/<config name>", description="Folder of the run; a pipeline holds one such folder a stage.")
    seed: Natural = Field(default=1, description="Decides every random number: data order, dropout, sampling, new weights.")
    resume: Literal["auto", "never", "must"] = Field(
        default="auto",
        description="auto: continue an unfinished run of the same configuration, leave a finished one, refuse another one. "
        "never: refuse to continue. must: refuse to start anew.",
    )
    overwrite: bool = Field(default=False, description="Remove what an earlier run left in run.dir and start anew.")


class FromScratch(Section):
    """A new model with random weights; its tokenizer is trained from the data."""

    architecture: Text = Field(default="llama", description="A transformers model type, such as llama, qwen2 or gpt2.")
    hidden_size: Count = Field(description="Width of the residual stream.")
    num_layers: Count = Field(description="Number of transformer layers.")
    num_heads: Count = Field(description="Number of attention heads; divides hidden_size.")
    vocab_size: Annotated[int, Field(ge=260)] = Field(
        description="Tokens of the byte-level BPE tokenizer (256 bytes + 4 special and up)."
    )
    intermediate_size: Count | None = Field(
        default=None, description="Width of the MLP; null: the architecture's usual multiple of hidden_size."
    )
    num_kv_heads: Count | None = Field(default=None, description="Number of key-value heads; null: num_heads.")
    max_length: Count | None = Field(
        default=None, description="Longest sequence the model can hold; null: the architecture's default."
    )


class Lora(Section):
    """Low-rank adapters (Hu et al. 2021) on a frozen base, through peft."""

    rank: Count = Field(default=16, description="Rank of the update of each adapted matrix.")
    alpha: Positive = Field(default=32, description="The update is scaled by alpha / rank.")
    dropout: ProperShare = Field(default=0.0, description="Dropout on the adapter's input.")
    target_modules: Annotated[str | Annotated[tuple[str, ...], Strict(False)], Field(union_mode="left_to_right")] = Field(
        default="all-linear", description="Names of the modules to adapt; all-linear: every linear layer but the output head."
    )
    path: Text | None = Field(default=None, description="An adapter to continue; it is also the reference then.")
    share_base: Literal["auto"] | bool = Field(
        default="auto",
        description="PPO: actor, critic, reward model and reference are adapters on one base. auto: those that can be, that is a new critic and "
        "what critic.path and reward_model.path name where it is, or has beside it, an adapter over model.path (RUN/adapter). true: all, or the "
        "run is refused. false: each has a base of its own.",
    )


class Model(Section):
    """The model that is trained (PPO's actor)."""

    path: Text | None = Field(
        default=None, description="Model folder, run folder, .gguf file, hub id, or demo:base (the shipped tiny model)."
    )
    revision: Text | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    dtype: Dtype = Field(
        default="float32", description="Type of frozen weights (reference, LoRA base); trained weights are always float32."
    )
    quantization: Literal["nf4"] | None = Field(
        default=None,
        description="nf4: the matrices of the frozen base of model.lora are kept in 4 bits (QLoRA), 0.52 bytes a number, and made again in "
        "model.dtype for every product. Needs bitsandbytes: pip install 'accord[quantization]'. null: they are kept in model.dtype.",
    )
    chat_template: Text | None = Field(
        default=None,
        description="Chat template to use and to save with the model: chatml, llama3, human-assistant, alpaca, or a .jinja file; "
        "null: the tokenizer's own.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. Only for models you trust."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Compute activations again in the backward pass: less memory, more time."
    )
    disable_dropout: bool = Field(
        default=True, description="Set every dropout of the model to 0, so that old and new log-probabilities agree."
    )
    from_scratch: FromScratch | None = Field(default=None, description="Make a new model instead of loading model.path.")
    lora: Lora | None = Field(default=None, description="Train low-rank adapters instead of all weights; {} takes the defaults.")


class Reference(Section):
    """The frozen model that DPO and the KL penalty compare with."""

    path: Text | None = Field(
        default="${model.path}",
        description="Where it is loaded from; with model.lora: the adapter as it was at the start, else the base.",
    )
    dtype: Dtype = Field(default="${model.dtype}", description="Type of its weights.")  # type: ignore[arg-type]
    precompute: bool = Field(
        default=False,
        description="DPO: ask it once about every example before training, keep the answers on disk, and give its memory back.",
    )


class RewardModel(Section):
    """The reward model: what the stage `reward` starts from, and what PPO asks for scores."""

    path: Text | None = Field(
        default=None,
        description="Stage reward: the model to start from (null: model.path). PPO: the trained reward model. "
        "A pipeline fills it in for PPO.",
    )
    dtype: Dtype = Field(default="${model.dtype}", description="Type of its weights where it is frozen (PPO).")  # type: ignore[arg-type]
    max_length: Count | None = Field(
        default=None, description="Longest prompt + answer it scores, in its own tokens; null: its context."
    )


class Critic(Section):
    """PPO's value function."""

    path: Text | None = Field(
        default="${reward_model.path}", description="What it starts from; null: model.path with a new head."
    )
    lr: Positive = Field(default=5.0e-6, description="Its own learning rate.")
    share_trunk: bool = Field(
        default=False,
        description="No model of its own but a linear head on the actor's hidden states; critic.path is not used then.",
    )
    trunk_gradient: bool = Field(
        default=True,
        description="share_trunk: the value loss, times ppo.value_coef, also trains the actor's trunk. false: the head alone learns from it.",
    )
    warmup_steps: Natural = Field(default=0, description="PPO steps at the start in which only the critic learns.")


# --------------------------------------------------------------------------------------------------------------------------- data


class Source(Section):
    """One place where rows come from."""

    path: Text = Field(description="File, folder, hub id, '-' (standard input) or demo:NAME.")
    split: Text | None = Field(
        default=None, description="Split of a datasets folder or a hub data set; null: train (valid: validation or test)."
    )
    max_rows: Count | None = Field(default=None, description="Use only so many rows, the first ones.")
    stages: Annotated[tuple[StageName, ...], Strict(False), Field(min_length=1)] | None = Field(
        default=None, description="Stages that read this source; null: all."
    )
    format: FormatName | Literal["auto"] | None = Field(default=None, description="Format of its rows; null: data.format.")
    columns: dict[str, str] | None = Field(default=None, description="Its own column mapping; null: data.columns.")


def as_sources(value: Any) -> Any:
    """A path, one source or a list of either → a list of sources, as mappings."""
    if isinstance(value, (str, Path, Mapping, Source)):
        value = [value]
    if isinstance(value, (list, tuple)):
        return [{"path": str(item)} if isinstance(item, (str, Path)) else item for item in value]
    return value


Sources = Annotated[Annotated[tuple[Source, ...], Strict(False), Field(min_length=1)] | None, BeforeValidator(as_sources)]


class Data(Section):
    """What is trained and evaluated on."""

    train: Sources = Field(
        default=None, description="A path, a hub id, or a list of sources {path, split, max_rows, stages, format, columns}."
    )
    valid: Sources = Field(default=None, description="Validation data, like data.train; null: data.holdout of the training data.")
    holdout: ProperShare = Field(default=0.02, description="Share of the prompts kept for validation where data.valid is null.")
    format: FormatName | Literal["auto"] = Field(default="auto", description="Format of the rows; auto: found out by their keys.")
    columns: dict[str, str] = Field(default={}, description="Which column holds what: {prompt: question, chosen: good, …}.")
    max_length: Count = Field(
        default=1024, description="Longest sequence (prompt and answer) in tokens; for PPO: longest prompt."
    )
    truncate: Literal["drop", "left", "right"] = Field(
        default="drop",
        description="What is done with longer ones: leave out (counted), cut the oldest turns of the prompt, cut the end.",
    )
    on_bad_row: Literal["fail", "drop"] = Field(
        default="fail", description="An unreadable row ends the run before it starts, or is left out (counted)."
    )
    shuffle: bool = Field(default=True, description="A new order in every epoch, by run.seed.")
    cache: bool = Field(default=True, description="Keep the tokenised data on disk ($ACCORD_CACHE or ~/.cache/accord).")


# ----------------------------------------------------------------------------------------------------------------- the loop's rhythm


class Train(Section):
    """The optimizer and its schedule."""

    batch_size: Count = Field(
        default=32, description="Examples (sequences, pairs, prompts) of one optimizer step; of one experience in PPO."
    )
    max_tokens: Count = Field(
        default=4096, description="Token budget of one pack: what is computed at once. Lower it when memory is short."
    )
    epochs: Positive = Field(default=1, description="Passes over the training data.")
    max_steps: Count | None = Field(
        default=None, description="Stop after so many steps, however many epochs that is; null: train.epochs."
    )
    lr: Positive | None = Field(
        default=None,
        description="Learning rate; null: sft 1e-5, reward 5e-6, dpo 1e-6 (0.5–5e-6 is usual), ppo 1e-6; ten times that with LoRA.",
    )
    lr_schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="Shape of the decay after the warm-up."
    )
    warmup_ratio: Share = Field(default=0.1, description="Share of the steps in which the rate rises to train.lr.")
    min_lr_ratio: Share = Field(default=0.1, description="Where the decay ends, as a share of train.lr.")
    weight_decay: NonNegative = Field(default=0.0, description="AdamW's decoupled decay, on matrices only.")
    betas: Annotated[tuple[ProperShare, ProperShare], Strict(False)] = Field(
        default=(0.9, 0.95), description="Adam's two decay rates."
    )
    eps: Positive = Field(default=1.0e-8, description="Adam's ε.")
    max_grad_norm: Positive = Field(default=1.0, description="The gradient of a step is scaled down to this norm.")
    precision: Literal["float32", "bf16"] = Field(
        default="float32", description="bf16: compute in bfloat16 over float32 master weights."
    )
    shard: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="With several processes: divide weights, gradients and moments over them (FSDP2), or keep whole copies. auto: divide "
        "on GPUs. Frozen models likewise.",
    )
    offload: Literal["none", "params"] = Field(
        default="none",
        description="params: what a process holds of a sharded model lies in the CPU's memory, and the optimizer works there.",
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Keep an exponential moving average of the weights (0.992 is DeepSpeed-Chat's), saved beside the model.",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="A loss or gradient that is not finite ends the run, or skips the step (counted; five in a row end the run).",
    )


class Eval(Section):
    """When the held-out part is evaluated. Triggers add up."""

    at_start: bool = Field(default=True, description="Evaluate before the first update.")
    every_steps: Count | None = Field(default=None, description="Evaluate every so many steps.")
    every_epochs: Positive | None = Field(
        default=1, description="Evaluate every so many epochs; the end of the run is always evaluated."
    )
    every_seconds: Positive | None = Field(default=None, description="Evaluate when so much time has gone by.")
    max_examples: Count | None = Field(default=None, description="Use only so many held-out examples, always the same ones.")
    best_metric: Text | None = Field(
        default=None, description="Keep the model with the best value of this metric at RUN/best, e.g. dpo/reward_accuracy."
    )


class Checkpoint(Section):
    """When resumable state is saved. Triggers add up; the end of a run and an interrupt always save."""

    every_steps: Count | None = Field(default=None, description="Save every so many steps.")
    every_epochs: Positive | None = Field(default=None, description="Save every so many epochs.")
    every_seconds: Positive | None = Field(default=600, description="Save when so much time has gone by.")
    keep_last: Count = Field(default=2, description="Checkpoints kept; older ones go once a newer one is whole.")
    asynchronous: bool = Field(
        default=False,
        description="Copy what is saved to CPU memory (as much as model, optimizer and EMA take) and write it while training goes on.",
    )


class Export(Section):
    """When a loadable model is written to RUN/exports/step-N, beside RUN/model at the end."""

    every_steps: Count | None = Field(default=None, description="Export every so many steps.")
    every_epochs: Positive | None = Field(default=None, description="Export every so many epochs.")


# ------------------------------------------------------------------------------------------------------------------------- stages


class SFT(Section):
    """Supervised fine-tuning."""

    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant", description="Every assistant turn, the last one, or every token."
    )
    label_smoothing: ProperShare = Field(default=0.0, description="Share of the target given to all tokens alike.")
    neftune_alpha: Positive | None = Field(default=None, description="Noise on the embeddings (Jain et al. 2023); 5 is usual.")


class Reward(Section):
    """Reward model."""

    loss_type: Literal["pairwise", "ranking", "token_pairwise", "log_exp", "mse"] = Field(
        default="pairwise",
        description="On preferences: pairwise, Bradley–Terry on the last token's score; token_pairwise, on the score at every token that "
        "only one of the answers has (DeepSpeed-Chat); log_exp, pairwise without margin (ColossalChat). On rankings of two or more "
        "answers, pairs too: ranking, Bradley–Terry on all pairs of a prompt (InstructGPT). On scores: mse, regression.",
    )
    center_coefficient: NonNegative = Field(
        default=0.0, description="Pulls the sum of a pair's scores to 0 (Eisenstein et al. 2023); 0.01 is usual. Not with mse."
    )


ReferencedLoss = Literal["sigmoid", "ipo", "hinge", "robust"]  # on pairs, against a reference


class DPO(Section):
    """Direct preference optimisation (Rafailov et al. 2023)."""

    loss_type: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = Field(
        default="sigmoid",
        description="sigmoid: DPO. ipo: squared loss on the mean log-ratio (Azar et al. 2023). hinge: no gradient beyond the margin "
        "(SLiC). robust: corrects for a share dpo.label_smoothing of swapped labels (Chowdhury et al. 2024). Without a reference: "
        "simpo, mean log-probabilities (Meng et al. 2024); orpo, SFT with an odds ratio (Hong et al. 2024). "
        "kto: single answers marked desirable or not, or both sides of pairs (Ethayarajh et al. 2024).",
    )
    loss_weights: dict[ReferencedLoss, Positive] | None = Field(
        default=None,
        description="A mix that takes the place of dpo.loss_type: {sigmoid: 0.8, ipo: 0.2}; the losses' weighted sum.",
    )
    beta: Positive = Field(
        default=0.1,
        description="Strength of the pull towards the reference; 0.05–0.5 is usual. simpo: scale of the mean log-probabilities, near 2.",
    )
    beta_end: Positive | None = Field(default=None, description="β moves from dpo.beta to this over the run; null: it stays.")
    beta_schedule: Literal["linear", "cosine"] = Field(default="linear", description="The way β takes to dpo.beta_end.")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="Assumed share ε of swapped labels; sigmoid (cDPO) and robust only."
    )
    rpo_alpha: Positive | None = Field(
        default=None,
        description="Weight of an SFT term on the chosen answer, its mean negative log-likelihood (Pang et al. 2024); null: none, "
        "1 is usual.",
    )
    simpo_gamma: NonNegative = Field(
        default=1.0, description="simpo: margin γ by which the chosen answer's reward should be the greater one."
    )
    orpo_lambda: Positive = Field(default=0.1, description="orpo: weight λ of the odds ratio beside the SFT loss.")

    desirable_weight: Positive = Field(default=1.0, description="kto: weight λ_D of desirable answers.")
    undesirable_weight: Positive = Field(default=1.0, description="kto: weight λ_U of undesirable answers.")

    @property
    def mix(self) -> dict[ReferencedLoss, float]:
        """The losses on pairs with a reference, each with its weight; {} for the others."""
        if self.loss_weights is not None:
            return self.loss_weights
        return {self.loss_type: 1.0} if self.loss_type in get_args(ReferencedLoss) else {}  # type: ignore[dict-item]

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a frozen reference."""
        return self.loss_type not in ("simpo", "orpo")


class Generate(Section):
    """How answers are sampled, in PPO and by generate, chat and evaluate."""

    max_new_tokens: Count = Field(default=256, description="Longest answer.")
    min_new_tokens: Natural = Field(default=0, description="No answer ends before so many tokens.")
    temperature: NonNegative = Field(default=1.0, description="0: always the most likely token.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Sample from the smallest set with this much probability."
    )
    top_k: Natural = Field(default=0, description="Sample from the k most likely tokens; 0: all.")
    min_p: ProperShare = Field(default=0.0, description="Leave out tokens less likely than this share of the most likely one.")
    repetition_penalty: Positive = Field(
        default=1.0, description="Divides the logits of tokens that have occurred (Keskar et al. 2019)."
    )
    stop: Annotated[tuple[Text, ...], Strict(False)] = Field(default=(), description="Strings that end an answer.")
    seed: Natural | None = Field(default=None, description="Seed of the sampling; null: run.seed.")


class Engine(Section):
    """The Hybrid Engine: how a model is sampled, in PPO beside the training of the same weights and by generate, chat and evaluate."""

    enabled: bool = Field(
        default=True,
        description="false: the model's own forward generates, for comparison; slower, the same answers up to rounding.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="What it computes in. auto: what the trainer computes in (train.precision), elsewhere the weights' own type. "
        "Another type than the weights' takes a copy of them, renewed after every step.",
    )
    max_slots: Literal["auto"] | Count = Field(
        default="auto", description="Answers under way at once; auto: as many as fit a cache of 2 GiB, at most 256."
    )
    max_out_tokens: Count | None = Field(
        default=None,
        description="Most tokens of prompt and answer together; null: the model's context. The cache grows as needed.",
    )
    release_inference_cache: bool = Field(
        default=False, description="Give cache and copied weights back before training; they are made anew for every batch."
    )
    inference_tp_size: Count = Field(
        default=1,
        description="PPO on several processes: so many share one copy of the layers while sampling (tensor parallel), each with its part of "
        "the heads, the MLP and the cache. It divides the number of processes, heads, key-value heads and MLP width.",
    )
    pin_parameters: bool = Field(
        default=True,
        description="PPO with sharded weights: true, they are whole in every process while sampling; false, layers are gathered a group at a "
        "time in every step, which takes little memory and much sending.",
    )
    tp_gather_partition_size: Count = Field(
        default=8, description="Layers gathered at a time, with pin_parameters=false or inference_tp_size above 1."
    )
    enable_cuda_graph: bool = Field(default=False, description="Record the decoding step as CUDA graphs.")


# ----------------------------------------------------------------------------------------------------------------- pipeline and track


class Pipeline(Section):
    """What `accord run` does."""

    stages: Annotated[tuple[StageName, ...], Strict(False), Field(min_length=1)] = Field(
        default=("sft", "reward", "ppo"),
        description="The stages to run, in this order; `stages=[…]` on the command line is short for it.",
    )
    judge: FunctionPath | None = Field(
        default=None, description="module:function that scores answers of every stage's model at the end (0 to 1)."
    )
    judge_prompts: Sources = Field(default=None, description="The prompts it judges on, like data.train.")


class Track(Section):
    """What is recorded beside metrics.jsonl."""

    tensorboard: bool = Field(default=True, description="Write TensorBoard files to RUN/tensorboard.")
    console_every: Count = Field(default=1, description="Print every so many steps.")
    samples_every: Count = Field(default=10, description="Write samples to samples.jsonl every so many steps.")
