"""List the families of models that make vectors or scores of texts, as rows of differences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HalfNorms:
    """The norms of half a layer, by their tensors' names; None: no such norm."""

    before: str | None = None
    """Norms its input."""
    after: str | None = None
    """Norms its output."""
    joined: str | None = None
    """Norms the sum of both."""


@dataclass(frozen=True, slots=True)
class HeadStep:
    """A product that what was pooled goes through, its activation, and a norm."""

    name: str
    activation: str | None = None
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class TextFamily:
    """How one family names its tensors and settings, and what its layers do."""

    architectures: tuple[str, ...]
    """Models that make vectors, as config.json names them."""
    classifiers: tuple[str, ...]
    """Models with a head that makes scores."""
    prefixes: tuple[str, ...]
    """What the names of tensors may begin with, depending on how they were saved."""
    words: str
    layer: str
    """A layer's names begin with this and its number."""
    qkv: tuple[str, ...]
    output: str
    gate_up: tuple[str, ...]
    """The products before the activation; two halves, of which one is the gate, if `is_gated`."""
    down: str
    attention_norms: HalfNorms
    mlp_norms: HalfNorms
    norm: str
    """`layer`, `rms`, or `rms_from_1` with weights that are stored less 1."""
    eps: tuple[str, float]
    """The key of what norms add to variances, and its default."""
    activation: tuple[str, str]
    """The key of the activation, and its default."""
    has_bias: bool = False
    """Whether every product and norm has a bias; False: only where a bias is stored."""
    is_gated: bool = False
    has_gate_last: bool = False
    """Whether the second half of the products before the activation is the gate."""
    is_causal: bool = False
    embedding_norm: str | None = None
    final_norm: str | None = None
    positions: str | None = None
    """The table of learned positions; None: queries and keys are turned."""
    counts_from_padding: bool = False
    """Whether the first position is the padding token's id + 1."""
    token_types: str | None = None
    marks_pairs: bool = False
    """Whether the second text of a pair is of another type."""
    qk_norms: tuple[str, str] | None = None
    """Norms of each head of queries, and of keys."""
    theta: tuple[str, float] | None = None
    """The key of the rotation's base, and its default."""
    local_theta: tuple[str, float] | None = None
    """The same for layers with windows."""
    has_ntk: bool = False
    """Whether a rotation may be stretched by a factor, of the kind `ntk`."""
    window: str | None = None
    """The key of the size of windows, of which half lies on each side."""
    every: tuple[str, int, int] | None = None
    """The key of the distance between full layers, its default, and the first full layer."""
    scales_words: bool = False
    """Whether embeddings are multiplied by the root of their size."""
    scale_key: str | None = None
    """The key of what queries are scaled by the root of; None: a head's size."""
    pooling: str = "mean"
    """How vectors are pooled where the folder does not say; the classifier's, too."""
    classifier_pooling: str = "cls"
    pooling_key: str | None = None
    """The key that may change how the classifier pools."""
    head: tuple[HeadStep, ...] = ()
    """Of a classifier."""
    must_be_on: tuple[str, ...] = ()
    must_be_off: tuple[str, ...] = ()
    """Keys that are served with one value only; absent is off."""
    must_be: tuple[tuple[str, str], ...] = ()
    """Keys with the text that is served; absent is that."""
    must_be_1: tuple[str, ...] = ()
    """Keys of shares; absent is 1."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Keys, each with another that may be there in its place."""


_BERT_LAYER = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "layer": "encoder.layer.",
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "output": "attention.output.dense",
    "gate_up": ("intermediate.dense",),
    "down": "output.dense",
    "attention_norms": HalfNorms(joined="attention.output.LayerNorm"),
    "mlp_norms": HalfNorms(joined="output.LayerNorm"),
    "norm": "layer",
    "eps": ("layer_norm_eps", 1e-12),
    "activation": ("hidden_act", "gelu"),
    "has_bias": True,
    "must_be_off": ("is_decoder",),
    "must_be": (("position_embedding_type", "absolute"),),
}
_DECODER_LAYER = {
    "prefixes": ("model.",),
    "words": "embed_tokens",
    "layer": "layers.",
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": "self_attn.o_proj",
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": "mlp.down_proj",
    "is_gated": True,
    "eps": ("rms_norm_eps", 1e-6),
    "final_norm": "norm",
    "qk_norms": ("self_attn.q_norm", "self_attn.k_norm"),
}

TEXT_FAMILIES = (
    TextFamily(
        architectures=("BertModel", "BertForMaskedLM"),
        classifiers=("BertForSequenceClassification",),
        prefixes=("bert.",),
        marks_pairs=True,
        head=(HeadStep("pooler.dense", "tanh"), HeadStep("classifier")),
        **_BERT_LAYER,  # type: ignore[arg-type]
    ),
    TextFamily(
        architectures=(
            "RobertaModel",
            "RobertaForMaskedLM",
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "CamembertModel",
            "CamembertForMaskedLM",
        ),
        classifiers=(
            "RobertaForSequenceClassification",
            "XLMRobertaForSequenceClassification",
            "CamembertForSequenceClassification",
        ),
        prefixes=("roberta.",),
        counts_from_padding=True,
        head=(HeadStep("classifier.dense", "tanh"), HeadStep("classifier.out_proj")),
        **_BERT_LAYER,  # type: ignore[arg-type]
    ),
    TextFamily(
        architectures=("ModernBertModel", "ModernBertForMaskedLM"),
        classifiers=("ModernBertForSequenceClassification",),
        prefixes=("model.",),
        words="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        layer="layers.",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        gate_up=("mlp.Wi",),
        down="mlp.Wo",
        attention_norms=HalfNorms(before="attn_norm"),
        mlp_norms=HalfNorms(before="mlp_norm"),
        norm="layer",
        eps=("norm_eps", 1e-5),
        activation=("hidden_activation", "gelu"),
        is_gated=True,
        final_norm="final_norm",
        theta=("global_rope_theta", 160_000.0),
        local_theta=("local_rope_theta", 10_000.0),
        window="local_attention",
        every=("global_attn_every_n_layers", 3, 0),
        pooling_key="classifier_pooling",
        head=(HeadStep("head.dense", "gelu", "head.norm"), HeadStep("classifier")),
    ),
    TextFamily(
        architectures=("NomicBertModel",),
        classifiers=(),
        prefixes=("bert.", "nomic_bert."),
        words="embeddings.word_embeddings",
        token_types="embeddings.token_type_embeddings",
        embedding_norm="emb_ln",
        layer="encoder.layers.",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        gate_up=("mlp.fc12", "mlp.fc11"),
        down="mlp.fc2",
        attention_norms=HalfNorms(joined="norm1"),
        mlp_norms=HalfNorms(joined="norm2"),
        norm="layer",
        eps=("layer_norm_eps", 1e-12),
        activation=("hidden_act", "silu"),
        is_gated=True,
        theta=("rope_theta", 1000.0),
        must_be_off=("prenorm", "causal", "rotary_emb_interleaved", "rotary_scaling_factor"),
        must_be_1=("rotary_emb_fraction",),
        aliases=(
            ("hidden_size", "n_embd"),
            ("num_attention_heads", "n_head"),
            ("num_hidden_layers", "n_layer"),
            ("intermediate_size", "n_inner"),
            ("max_position_embeddings", "n_positions"),
            ("layer_norm_eps", "layer_norm_epsilon"),
            ("hidden_act", "activation_function"),
            ("rope_theta", "rotary_emb_base"),
        ),
    ),
    TextFamily(
        architectures=("GteModel", "NewModel", "NewForMaskedLM", "NewForTokenClassification"),
        classifiers=("GteForSequenceClassification", "NewForSequenceClassification"),
        prefixes=("new.", "gte."),
        words="embeddings.word_embeddings",
        token_types="embeddings.token_type_embeddings",
        embedding_norm="embeddings.LayerNorm",
        layer="encoder.layer.",
        qkv=("attention.qkv_proj",),
        output="attention.o_proj",
        gate_up=("mlp.up_gate_proj",),
        down="mlp.down_proj",
        attention_norms=HalfNorms(joined="attn_ln"),
        mlp_norms=HalfNorms(joined="mlp_ln"),
        norm="layer",
        eps=("layer_norm_eps", 1e-12),
        activation=("hidden_act", "gelu"),
        is_gated=True,
        has_gate_last=True,
        theta=("rope_theta", 160_000.0),
        has_ntk=True,
        pooling="cls",
        head=(HeadStep("pooler.dense", "tanh"), HeadStep("classifier")),
        must_be_off=("logn_attention_scale",),
        must_be=(("layer_norm_type", "layer_norm"), ("position_embedding_type", "rope")),
    ),
    TextFamily(
        architectures=("Qwen3Model", "Qwen3ForCausalLM"),
        classifiers=("Qwen3ForSequenceClassification",),
        attention_norms=HalfNorms(before="input_layernorm"),
        mlp_norms=HalfNorms(before="post_attention_layernorm"),
        norm="rms",
        activation=("hidden_act", "silu"),
        is_causal=True,
        theta=("rope_theta", 10_000.0),
        pooling="lasttoken",
        classifier_pooling="lasttoken",
        head=(HeadStep("score"),),
        must_be_off=("use_sliding_window",),
        **_DECODER_LAYER,  # type: ignore[arg-type]
    ),
    TextFamily(
        architectures=("Gemma3TextModel",),
        classifiers=(),
        attention_norms=HalfNorms("input_layernorm", "post_attention_layernorm"),
        mlp_norms=HalfNorms("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        norm="rms_from_1",
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        theta=("rope_theta", 1_000_000.0),
        local_theta=("rope_local_base_freq", 10_000.0),
        window="sliding_window",
        every=("_sliding_window_pattern", 6, 5),
        scales_words=True,
        scale_key="query_pre_attn_scalar",
        must_be_on=("use_bidirectional_attention",),
        must_be_off=("attn_logit_softcapping",),
        **_DECODER_LAYER,  # type: ignore[arg-type]
    ),
)
TEXT_FAMILY_BY_ARCHITECTURE = {
    name: family
    for family in TEXT_FAMILIES
    for name in (*family.architectures, *family.classifiers)
}
