"""Model shapes: what a decoder can be, the named presets, and the config section that picks one.

Nothing here imports jax, so that a plan can be printed without it.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

from curriculum.errors import FieldError, InputError, nearest
from curriculum.model.formulation import cudnn_problem, scan_problem
from curriculum.parsing.typed import Limits


@dataclass(frozen=True)
class RopeScaling:
    """Wavelengths of rope stretched, so that a model reads further than it was first trained to."""

    kind: Literal["linear", "llama3"]
    """linear stretches all wavelengths alike, llama3 only the long ones, as in Llama 3.1."""
    factor: Annotated[float, Limits(ge=1, le=1e6)]
    """How many times longer the wavelengths become."""
    original_max_seq_len: Annotated[int, Limits(ge=1, le=1 << 24)] | None = None
    """For llama3: the positions that the model was trained with before."""
    low_freq_factor: Annotated[float, Limits(gt=0, le=1e6)] = 1.0
    """For llama3: wavelengths above original_max_seq_len / this are stretched by the whole factor."""
    high_freq_factor: Annotated[float, Limits(gt=0, le=1e6)] = 4.0
    """For llama3: wavelengths below original_max_seq_len / this stay; between the two the change is smooth."""

    def __post_init__(self):
        if (self.kind == "llama3") == (self.original_max_seq_len is None):
            key = "kind" if self.original_max_seq_len is None else "original_max_seq_len"
            raise FieldError(key, f"original_max_seq_len belongs to kind llama3, which needs it; got kind {self.kind}")
        if self.low_freq_factor >= self.high_freq_factor:
            got = f"low_freq_factor {self.low_freq_factor}, high_freq_factor {self.high_freq_factor}"
            raise FieldError("low_freq_factor", f"got {got}; expected the first below the second")


@dataclass(frozen=True)
class LoraConfig:
    """Train adapters of low rank beside frozen matrices (arXiv:2106.09685): y = x W + (alpha / rank) (x A) B."""

    rank: Annotated[int, Limits(ge=1, le=1 << 16)] = 16
    """Columns of A and rows of B; at most the smaller side of each adapted matrix."""
    alpha: Annotated[float, Limits(gt=0, le=1e6)] = 32.0
    """The adapters' output is scaled by alpha / rank, so that another rank needs no other learning rate."""
    targets: tuple[Literal["query", "key", "value", "out", "gate", "up", "down"], ...] = ("query", "value")
    """Matrices of every block that get an adapter: query, key, value, out, gate (of swiglu), up, down."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: its architecture, which never changes within a run, and how it is computed.

    The fields are those of `ModelSection`, which describes them. `n_kv_head` below `n_head` is grouped-query attention
    (arXiv:2305.13245). `d_ff` is the same for swiglu (three matrices) and gelu (two). Learned positions are a table of
    `max_seq_len`; rope, to which alone `rope_theta` and `rope_scaling` apply, only observes that bound. rmsnorm has no
    bias. With `no_rope_every` = n, layers n, 2n, ... have no positions at all. With `lora` some matrices have adapters,
    and only these are trained. `attention` and `layers` name a formulation of `curriculum.model.formulation`; auto is
    what suits the backend, deterministic the same but never cuDNN's.
    """

    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    d_model: int
    d_ff: int
    max_seq_len: int
    pos_encoding: Literal["rope", "learned"] = "rope"
    mlp_type: Literal["swiglu", "gelu"] = "swiglu"
    norm_type: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    bias: bool = False
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    num_ids: int | None = None
    d_head: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    no_rope_every: int | None = None
    sliding_window: int | None = None
    lora: LoraConfig | None = None
    dropout: float = 0.0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "dots", "full"] = "none"
    attention: Literal["auto", "deterministic", "plain", "xla", "cudnn", "splash"] = "auto"
    layers: Literal["auto", "unrolled", "scanned"] = "auto"

    @property
    def architecture(self) -> dict[str, Any]:
        """What stays the same for the whole run: not the fields in HOW, nor those in RARE that have defaults."""
        unused = {f.name for f in fields(self) if f.name in RARE and getattr(self, f.name) == f.default}
        return {name: setting for name, setting in asdict(self).items() if name not in HOW and name not in unused}

    def defaults_beside(self, known: Collection[str]) -> dict[str, Any]:
        """The defaults of the architecture's fields except those `known`, for a format that knows no others."""
        return {f.name: f.default for f in fields(self) if f.name not in (*known, *HOW)}

    @classmethod
    def of(cls, architecture: Mapping[str, Any]) -> "ModelConfig":
        """The config of an `architecture`, with the defaults for how it is computed."""
        scaling, lora = architecture.get("rope_scaling"), architecture.get("lora")
        if lora is not None:
            lora = LoraConfig(**{**lora, "targets": tuple(lora["targets"])})
        return cls(**{**architecture, "rope_scaling": scaling and RopeScaling(**scaling), "lora": lora})

    @property
    def head_width(self) -> int:
        """K, the width of one head."""
        return self.d_head or self.d_model // self.n_head

    def projections(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each matrix of a block, by name."""
        query_width, kv_width = self.n_head * self.head_width, self.n_kv_head * self.head_width
        return {
            "query": (self.d_model, query_width),
            "key": (self.d_model, kv_width),
            "value": (self.d_model, kv_width),
            "out": (query_width, self.d_model),
            **({"gate": (self.d_model, self.d_ff)} if self.mlp_type == "swiglu" else {}),
            "up": (self.d_model, self.d_ff),
            "down": (self.d_ff, self.d_model),
        }

    def has_rope(self, layer: int) -> bool:
        """Whether a layer, counted from 0, rotates its queries and keys."""
        skipped = self.no_rope_every is not None and (layer + 1) % self.no_rope_every == 0
        return self.pos_encoding == "rope" and not skipped


@dataclass(frozen=True)
class ModelSection:
    """The `model` section of a config: a preset, single fields, or a preset with fields overridden.

    `from` is replaced by the fields that it stands for when a config is read. Without a preset n_layer, n_head,
    d_model, d_ff and max_seq_len are needed, and the rest has ModelConfig's defaults. `n_kv_head` left out follows
    n_head wherever the preset's heads are not grouped. `vocab_size` left out is the tokenizer's; a larger one pads the
    embedding.
    """

    preset: str | None = None
    """A named shape: tiny, gpt2-124m, llama-360m, llama-1b, llama-3b, llama-7b."""
    from_: str | None = None
    """A Hugging Face folder: the shape of its config.json, in place of a preset. Its weights: adaptation.init_from."""
    vocab_size: int | None = None
    """Rows of the embedding; by default one per tokenizer id, never fewer. More are padding, which can be faster."""
    n_layer: int | None = None
    """Blocks."""
    n_head: int | None = None
    """Query heads; must divide d_model unless d_head is given."""
    n_kv_head: int | None = None
    """Key and value heads; must divide n_head. n_head by default, unless the preset sets it."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Inner width of the feed-forward."""
    max_seq_len: int | None = None
    """Maximum number of positions in a sequence."""
    pos_encoding: Literal["rope", "learned"] | None = None
    """rope (rotated queries and keys), the default unless the preset sets it, or learned (a table added to the
    embedding)."""
    mlp_type: Literal["swiglu", "gelu"] | None = None
    """Feed-forward: swiglu (gated), the default unless the preset sets it, or gelu in its tanh form."""
    norm_type: Literal["rmsnorm", "layernorm"] | None = None
    """Norm before each part of a block and before the head; rmsnorm by default, unless the preset sets it."""
    bias: bool | None = None
    """Biases in linear layers and layernorms; false by default, unless the preset sets it."""
    tie_embeddings: bool | None = None
    """The head is the embedding's transpose; true by default, unless the preset sets it."""
    rope_theta: float | None = None
    """Base of rope's wavelengths; 10,000 by default, unless the preset sets it."""
    norm_eps: float | None = None
    """Added to the variance in a norm; 1e-5 by default, unless the preset sets it."""
    num_ids: int | None = None
    """Ids that can be predicted, by default the tokenizer's; rows of the embedding beyond them are padding."""
    d_head: int | None = None
    """Width of a head; by default d_model / n_head."""
    qkv_bias: bool | None = None
    """Biases of query, key and value only."""
    qk_norm: bool | None = None
    """An rmsnorm of each head's queries and keys, before they are rotated."""
    rope_scaling: RopeScaling | None = None
    """Rope stretched beyond the positions that the model was first trained with."""
    no_rope_every: int | None = None
    """Every n-th layer has no rope."""
    sliding_window: int | None = None
    """How many tokens a token attends to, itself included; by default all before it."""
    dropout: float | None = None
    """Share of what enters the residual stream that training zeroes; 0 (the default) or more, below 1."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of products and activations; by default float32, as parameters, norms, softmax and loss always are."""
    remat: Literal["none", "dots", "full"] | None = None
    """What is kept for the backward pass: everything (none, the default), products with weights (dots), or only what
    enters a block (full)."""
    attention: Literal["auto", "plain", "xla", "cudnn"] | None = None
    """How attention is computed: auto is flash attention if it is possible (cudnn on NVIDIA GPUs, jax's kernel on
    TPUs), else plain, or xla if mesh.tensor splits the heads."""
    layers: Literal["auto", "unrolled", "scanned"] | None = None
    """How layers are computed: one after another (unrolled) or in a loop (scanned); auto is unrolled on CPUs, NVIDIA
    GPUs and TPUs."""


PRESETS = {
    "tiny": ModelConfig(vocab_size=4096, n_layer=4, n_head=4, n_kv_head=2, d_model=128, d_ff=256, max_seq_len=1024),
    # GPT-2 small, as released: 124,439,808 parameters.
    "gpt2-124m": ModelConfig(
        vocab_size=50257, n_layer=12, n_head=12, n_kv_head=12, d_model=768, d_ff=3072, max_seq_len=1024,
        pos_encoding="learned", mlp_type="gelu", norm_type="layernorm", bias=True,
    ),
    # The shape of SmolLM2-360M.
    "llama-360m": ModelConfig(
        vocab_size=49152, n_layer=32, n_head=15, n_kv_head=5, d_model=960, d_ff=2560, max_seq_len=8192,
        rope_theta=100_000.0,
    ),
    # The shape of Llama-3.2-1B. Its 131,072 positions come from rope scaling; 8,192 is what it was trained with before
    # that.
    "llama-1b": ModelConfig(
        vocab_size=128256, n_layer=16, n_head=32, n_kv_head=8, d_model=2048, d_ff=8192, max_seq_len=8192,
        rope_theta=500_000.0,
    ),
    # The shape of Llama-3.2-3B, with the positions of llama-1b.
    "llama-3b": ModelConfig(
        vocab_size=128256, n_layer=28, n_head=24, n_kv_head=8, d_model=3072, d_ff=8192, max_seq_len=8192,
        rope_theta=500_000.0,
    ),
    # Llama-2-7B, as released: 6,738,415,616 parameters.
    "llama-7b": ModelConfig(
        vocab_size=32000, n_layer=32, n_head=32, n_kv_head=32, d_model=4096, d_ff=11008, max_seq_len=4096,
        tie_embeddings=False,
    ),
}  # fmt: skip

HOW = ("dropout", "compute_dtype", "remat", "attention", "layers")  # fields of ModelConfig that are not architecture
RARE = ("num_ids", "d_head", "qkv_bias", "qk_norm", "rope_scaling", "no_rope_every", "sliding_window", "lora")

LARGEST_SIZE = 1 << 24
MOST_LAYERS = 1000  # the names of blocks have three digits, and are sorted as text
_SHAPES = ("preset", "from_")  # fields of ModelSection that stand for many
_SIZES = ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "max_seq_len")
_NEEDED_WITHOUT_PRESET = ("n_layer", "n_head", "d_model", "d_ff", "max_seq_len")


def model_problems(section: ModelSection, vocab_size: int | None = None) -> list[tuple[str, str]]:
    """Everything wrong with a `model` section, as (field, message).

    A message says what was got, what is expected and how to fix it. Empty if the section resolves. `vocab_size` is the
    tokenizer's; None if it is not known yet.
    """
    if section.preset is not None and section.preset not in PRESETS:
        near = nearest(section.preset, PRESETS)
        hint = f"; did you mean {near!r}?" if near else ""
        return [("preset", f"no such preset: {section.preset!r}{hint} (presets: {', '.join(PRESETS)})")]
    given = _merged(section)
    missing = [
        (name, f"missing; required without a preset (presets: {', '.join(PRESETS)})")
        for name in _NEEDED_WITHOUT_PRESET
        if name not in given
    ]
    if problems := [*missing, *_number_problems(section), *_vocab_problems(section, vocab_size)]:
        return problems
    config = ModelConfig(**{"vocab_size": 1} | given)
    if problems := _head_problems(config):
        return problems
    if section.attention == "cudnn" and (problem := cudnn_problem(config)):
        problems.append(("attention", f"{problem}; leave it out for auto"))
    if section.layers == "scanned" and (problem := scan_problem(config)):
        problems.append(("layers", f"{problem}; leave it out for auto"))
    return problems


def _number_problems(section: ModelSection) -> Iterator[tuple[str, str]]:
    for name in (*_SIZES, "vocab_size", "num_ids", "d_head", "no_rope_every", "sliding_window"):
        size, largest = getattr(section, name), MOST_LAYERS if name == "n_layer" else LARGEST_SIZE
        if size is not None and not 1 <= size <= largest:
            yield name, f"got {size}, expected a positive integer, at most {largest}"
    for name in ("rope_theta", "norm_eps"):
        number = getattr(section, name)
        if number is not None and not 0 < number < float("inf"):
            yield name, f"got {number}, expected a positive finite number"
    if section.dropout is not None and not 0 <= section.dropout < 1:
        yield "dropout", f"got {section.dropout}, expected 0 or more and below 1"


def _vocab_problems(section: ModelSection, vocab_size: int | None) -> Iterator[tuple[str, str]]:
    """What does not fit between vocab_size, num_ids and the tokenizer's `vocab_size`, if that is known."""
    fix = "leave it out to use the tokenizer's"
    own, num_ids = section.vocab_size, section.num_ids
    if None not in (own, vocab_size) and own < vocab_size:
        yield "vocab_size", f"got {own}, expected at least the tokenizer's {vocab_size}; {fix}"
    if num_ids is None:
        return
    rows = own or vocab_size
    if num_ids < (vocab_size or 1) or (rows is not None and num_ids > rows):
        fewest = "1" if vocab_size is None else f"the tokenizer's {vocab_size}"
        yield "num_ids", f"got {num_ids}, expected from {fewest} to vocab_size {rows}; {fix}"


def _head_problems(config: ModelConfig) -> list[tuple[str, str]]:
    n_head, d_model, d_head = config.n_head, config.d_model, config.d_head
    problems = []
    is_odd = config.pos_encoding == "rope" and config.head_width % 2
    if d_head is None and d_model % n_head:
        problems.append(("n_head", f"got {n_head}, expected a divisor of d_model {d_model}"))
    elif is_odd and d_head is None:
        got = f"got {n_head} for d_model {d_model}, a head width of {config.head_width}"
        fix = "change n_head or d_model, or set pos_encoding: learned"
        problems.append(("n_head", f"{got}; rope rotates pairs and needs an even one: {fix}"))
    elif is_odd:
        problems.append(("d_head", f"got {d_head}, expected an even number: rope rotates pairs"))
    if n_head % config.n_kv_head:
        problems.append(("n_kv_head", f"got {config.n_kv_head}, expected a divisor of n_head {n_head}"))
    return problems


def resolve_model(section: ModelSection, vocab_size: int) -> ModelConfig:
    """The architecture that a `model` section names, for a tokenizer of `vocab_size` ids.

    Raises InputError with one problem a line, each headed by `model.<field>`.
    """
    problems = model_problems(section, vocab_size)
    if problems:
        raise InputError(*(f"model.{name}: {message}" for name, message in problems))
    given = {"vocab_size": vocab_size, "num_ids": vocab_size} | _merged(section)
    padded = given["num_ids"] < given["vocab_size"]
    return ModelConfig(**given | {"num_ids": given["num_ids"] if padded else None})


def own_rope_theta(section: ModelSection) -> float:
    """The rope theta of the model that a `model` section names, for any tokenizer."""
    return _merged(section).get("rope_theta", ModelConfig.rope_theta)


def _merged(section: ModelSection) -> dict[str, Any]:
    """The fields that the section sets: its own over its preset's, vocab_size only if it sets it itself."""
    own = {field.name: getattr(section, field.name) for field in fields(section) if field.name not in _SHAPES}
    own = {name: setting for name, setting in own.items() if setting is not None}
    base = {}
    if section.preset is not None:
        base = asdict(PRESETS[section.preset])
        del base["vocab_size"], base["num_ids"]
    if base.get("n_head") == base.get("n_kv_head") and "n_head" in own:
        base["n_kv_head"] = own["n_head"]
    return base | own
