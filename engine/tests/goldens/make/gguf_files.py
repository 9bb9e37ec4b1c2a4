"""GGUF files written by gguf-py, with what it, transformers and tokenizers read from them.

Called by make.py. kinds.gguf has one matrix of every kind and kinds.safetensors what each stands for; model-gguf-* are whole models with their
answers; the vocabularies in them come with texts and their token ids.
"""

import json

import gguf
import numpy
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file
from tokenizers import Regex, decoders, pre_tokenizers, trainers

import families

TEXTS = [
    "the pod restarts; the pod's node is gone",
    " Two  spaces,\n\tand 12345 numbers\r\n\n it's",
    "na\u00efve caf\u00e9 \u65e5\u672c \U0001f600",
    "",
    "a<|end|>b",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def kinds(directory):
    """Kinds that gguf-py can write are quantised from weights; blocks of the others are random bytes with small scales."""
    random = numpy.random.default_rng(7)
    writer = gguf.GGUFWriter(directory / "kinds.gguf", "llama")
    expected = {}
    for kind in ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]:
        kind = Kind[kind]
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        if per_block < 256:
            weights = random.normal(0.3, 1.0, (3, 64)).astype(numpy.float32)
            data = gguf.quants.quantize(weights, kind)
        else:
            blocks = random.integers(0, 256, (3, 2, size), dtype=numpy.uint8)
            scales = random.uniform(0.001, 0.01, (3, 2, 2)).astype(numpy.float16).view(numpy.uint8)
            if kind == Kind.Q6_K:
                blocks[..., -2:] = scales[..., :2]
            else:
                blocks[..., :4] = scales
                # A group whose scale is 0 has its minimum only.
                blocks[0, 0, 4] = 0
            data = blocks.reshape(3, -1)
        name = f"{kind.name}.weight"
        writer.add_tensor(name, data, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(data, kind).astype(numpy.float32).reshape(3, -1)
    close(writer)
    save_file(expected, directory / "kinds.safetensors")


def close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_level():
    """A small byte-level BPE that splits as Llama 3 does."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def add_byte_level(writer):
    tokenizer = byte_level()
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = [token.startswith("<|") for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if one else 1 for one in special])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    return len(tokens), lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def add_sentencepiece(writer):
    """Bytes, characters and a few pieces; the pieces found first have the higher scores."""
    pieces = ["\u2581t", "he", "\u2581the", "\u2581p", "od", "\u2581pod", "re", "st", "\u2581a", "in", "er", "\u2581\u2581", "no", "de"]
    characters = sorted(set("".join(TEXTS).replace(" ", "\u2581")) - set("\U0001f600\n\t\r"))
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + pieces + characters
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(characters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(characters))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(False)
    return len(tokens), None


def permute(rows, heads):
    """As llama.cpp's converter orders the rows of queries and keys."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA2 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(key, names):
    module, suffix = key.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{names[module]}.{suffix}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{names[part]}.{suffix}"


def model(directory, name, kind, extra, vocabulary, seed):
    folder = directory / name
    folder.mkdir(exist_ok=True)
    path = folder / "model.gguf"
    architecture = name.rsplit("-", 1)[1]
    writer = gguf.GGUFWriter(path, architecture)
    size, encode = vocabulary(writer)
    config = kind(**(families.SIZES | dict(intermediate_size=64, vocab_size=size) | extra))
    state = families.random_model(config, seed).float().state_dict()
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(size)
    if architecture == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    reference = {}
    for key, tensor in state.items():
        data = tensor.numpy()
        if architecture == "gemma2" and key == "lm_head.weight":
            continue
        stored = Kind.F32
        if data.ndim == 2:
            stored = Kind.Q4_0 if "mlp" in key else Kind.F16 if "o_proj" in key else Kind.Q8_0
        packed = gguf.quants.quantize(data, stored)
        # What the file stands for; rows are quantised one by one, so their order does not matter.
        stands_for = gguf.quants.dequantize(packed, stored).astype(numpy.float32)
        reference[key] = torch.from_numpy(stands_for.reshape(data.shape).copy())
        if architecture == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            packed = gguf.quants.quantize(permute(data, heads), stored)
        if architecture == "gemma2" and "norm" in key:
            packed = data + 1.0
        writer.add_tensor(gguf_name(key, NAMES | (GEMMA2 if architecture == "gemma2" else {})), packed, raw_dtype=stored)
    close(writer)
    exact = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    exact.load_state_dict(reference, strict=architecture != "gemma2")
    exact.tie_weights()
    golden = families.answers(exact)
    # transformers reads the file too, by code of its own.
    other = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    assert families.answers(other)["output_ids"] == golden["output_ids"], name
    if encode is None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
        encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    golden["texts"] = [dict(text=text, ids=encode(text)) for text in TEXTS]
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


def write(directory):
    kinds(directory)
    model(directory, "model-gguf-llama", transformers.LlamaConfig, {}, add_byte_level, 200)
    model(
        directory,
        "model-gguf-gemma2",
        transformers.Gemma2Config,
        dict(sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
        add_sentencepiece,
        201,
    )
