"""Small random checkpoints of every family with the answers that transformers gives for them, in FP32.

Called by make.py. Writes, for each family, a folder with config.json, model.safetensors (BF16) and golden.json: the token ids of a prompt, the
logits of its last token, and the token ids that follow greedily.
"""

import json

import torch
import transformers

PROMPT = [1, 17, 3, 99, 42, 42, 7, 64, 5, 23, 88, 11, 2, 76, 31, 54, 9, 120, 66, 13]
NEW_TOKENS = 12

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=128,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)

FAMILIES = {
    "llama": (transformers.LlamaConfig, dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True)),
    "mistral": (transformers.MistralConfig, dict(sliding_window=6)),
    "qwen2": (transformers.Qwen2Config, dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=16)),
    "gemma2": (
        transformers.Gemma2Config,
        dict(sliding_window=5, query_pre_attn_scalar=24, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        dict(
            num_hidden_layers=3,
            sliding_window=5,
            query_pre_attn_scalar=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
                "sliding_attention": dict(rope_type="default", rope_theta=10000.0),
            },
        ),
    ),
    # Its q, k and v are one tensor, and so are gate and up.
    "phi3": (transformers.Phi3Config, dict(sliding_window=7)),
}


def answers(model):
    """What a model in FP32 answers, and with which program. Greedy tokens must win by far, or another order of sums could choose others."""
    model = model.eval()
    ids = list(PROMPT)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
        for _ in range(NEW_TOKENS):
            best, next_best = model(torch.tensor([ids])).logits[0, -1].topk(2).values
            assert best - next_best > 1e-3, "two tokens are nearly equal: take another seed"
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return dict(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        prompt_ids=PROMPT,
        logits=[round(float(x), 6) for x in logits],
        output_ids=ids[len(PROMPT) :],
    )


def random_model(config, seed):
    """Weights large enough that attention is not flat, norms that are not 1, biases that are not 0; all as BF16 stores them."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                # Gemma multiplies by 1 + weight.
                centre = 0.0 if "Gemma" in type(model).__name__ else 1.0
                parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model.bfloat16()


def write(directory):
    for seed, (name, (kind, extra)) in enumerate(FAMILIES.items()):
        model = random_model(kind(**(SIZES | extra)), seed)
        folder = directory / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        (folder / "golden.json").write_text(json.dumps(answers(model)) + "\n")
