"""Whole checkpoints in quantised layouts, with the answers that transformers gives for the weights they stand for, in FP32.

Called by make.py. A small random model's linears are replaced by quantised ones; the reference is the same model with what they stand for.
"""

import json

import numpy
import torch
import transformers
from safetensors.torch import save_file

import families
import layouts

EIGHT = dict(num_bits=8, type="int")


def quantised(name, linear, weight, random):
    """One linear of a case: its configuration, its tensors and the weights that they stand for; nothing when it stays as it is."""
    shape = tuple(weight.shape)
    if name == "model-ct-w8a8":
        return layouts.compressed_tensors(
            linear, "int-quantized", weight, **EIGHT, symmetric=True, strategy="channel"
        )
    if name == "model-ct-w4a16-fused":
        return layouts.compressed_tensors(
            linear, "pack-quantized", weight, num_bits=4, type="int", symmetric=False, strategy="group", group_size=16
        )
    if name == "model-fp8-fused":
        return layouts.fp8_block(linear, weight, 16)
    if name == "model-awq":
        return layouts.awq(linear, random, 16, shape)
    if name == "model-gptq":
        if linear.endswith("0.mlp.down_proj"):
            return None
        bits = 8 if linear.endswith("v_proj") else 4
        return layouts.gptq(linear, random, bits, 16, stored=-1, act_order=True, shape=shape)
    raise ValueError(name)


def write(directory):
    names = ["model-ct-w8a8", "model-ct-w4a16-fused", "model-fp8-fused", "model-awq", "model-gptq"]
    for seed, name in enumerate(names):
        family = "phi3" if name.endswith("fused") else "llama"
        kind, extra = families.FAMILIES[family]
        model = families.random_model(kind(**(families.SIZES | extra)), 100 + seed)
        random = numpy.random.default_rng(seed)
        reference, tensors = {}, {}
        for key, tensor in model.state_dict().items():
            linear = key.removesuffix(".weight")
            case = None
            if linear.endswith("_proj"):
                case = quantised(name, linear, tensor.float(), random)
            if case is None:
                reference[key] = tensor.float()
                tensors[key] = tensor.clone()
                continue
            _, config, packed, reference[key] = case
            tensors |= {f"{linear}.{part}": value.contiguous() for part, value in packed.items()}
        if name == "model-gptq":
            config |= dict(bits=4, dynamic={r"-:.*\.0\.mlp\.down_proj": {}, r"+:.*v_proj": {"bits": 8}})
        folder = directory / name
        folder.mkdir(exist_ok=True)
        model.config.quantization_config = config
        model.config.dtype = "bfloat16"
        architecture = type(model).__name__
        described = model.config.to_dict() | dict(architectures=[architecture], quantization_config=config)
        (folder / "config.json").write_text(json.dumps(described, default=str) + "\n")
        save_file(tensors, folder / "model.safetensors")
        del model.config.quantization_config
        exact = transformers.AutoModelForCausalLM.from_config(
            model.config, dtype=torch.float32, attn_implementation="eager"
        )
        exact.load_state_dict(reference)
        (folder / "golden.json").write_text(json.dumps(families.answers(exact)) + "\n")
