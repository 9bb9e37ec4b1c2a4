"""Reads exported checkpoints back with compressed-tensors and transformers and compares every weight with the engine's own.

Called by scripts/export-check with the engine and a work folder. The reference is the layout `dequantised`: FP32 weights that hold the quantised values.
"""
import json
import pathlib
import subprocess
import sys

import torch
import transformers
import compressed_tensors
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

MODEL = pathlib.Path("e2e/models/kube-llama-10m")
DATA = "e2e/data/calibration.jsonl"
CASES = [
    ("compressed-tensors", ["--scheme", "W4A16-g128", "--quantiser", "gptq"]),
    ("compressed-tensors", ["--scheme", "W4A16-g32", "--quantiser", "awq"]),
    ("compressed-tensors", ["--scheme", "W4A16-g64-asym", "--quantiser", "rtn"]),
    ("compressed-tensors", ["--scheme", "W4A16", "--quantiser", "gptq"]),
    ("compressed-tensors", ["--scheme", "W8A16", "--quantiser", "rtn"]),
    ("compressed-tensors", ["--scheme", "W8A8", "--quantiser", "smoothquant"]),
    ("compressed-tensors", ["--scheme", "FP8", "--quantiser", "rtn"]),
    ("compressed-tensors", ["--budget-bpw", "5.5", "--quantiser", "gptq"]),
    ("gptq", ["--scheme", "W4A16-g128", "--quantiser", "gptq"]),
    ("gptq", ["--scheme", "W4A16-g128", "--quantiser", "gptq", "--act-order", "group"]),
    ("gptq", ["--scheme", "W4A16-g64-asym", "--quantiser", "rtn"]),
    ("gptq", ["--scheme", "W8A16", "--quantiser", "gptq"]),
]


def export(engine, out, layout, options):
    command = [engine, "export", "--model", MODEL, "--data", DATA, "--samples", "16", "--sequence-length", "256",
               "--layout", layout, "--out", out, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out


def linears(reference):
    return [name.removesuffix(".weight") for name in reference if name.endswith("_proj.weight")]


def decompress_ct(folder, tensors, names):
    """Every linear's weights as compressed-tensors decompresses them, in FP32."""
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    groups = list(config.config_groups.values())
    for name in names:
        scheme = next(group for group in groups if name in group.targets or "Linear" in group.targets)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        state = {key.removeprefix(name + "."): value for key, value in tensors.items() if key.startswith(name + ".")}
        state["weight_scale"] = state["weight_scale"].float()
        plain = compressor.decompress(state, scheme)
        if scheme.format == "pack-quantized":
            # The package packs what it unpacked to the same bytes, so a reader that refuses them refuses its own.
            again = compressor.compress(plain, scheme)
            packed = ("weight_packed", "weight_zero_point")
            assert all(torch.equal(again[key], state[key]) for key in packed if key in state), name
        yield name, plain["weight"].float()


def unpack(words, bits, dim):
    shifts = torch.arange(0, 32, bits)
    if dim == 0:
        return ((words.unsqueeze(1) >> shifts[None, :, None]) & (2**bits - 1)).reshape(-1, words.shape[1])
    return ((words.unsqueeze(2) >> shifts[None, None, :]) & (2**bits - 1)).reshape(words.shape[0], -1)


def dequantise_gptq(folder, tensors, names):
    """GPTQ v1 as AutoGPTQ's torch kernel computes it: scales[g] * (q - (z + 1))."""
    raw = json.loads((folder / "quantize_config.json").read_text())
    for name in names:
        part = lambda ending: tensors[f"{name}.{ending}"]
        codes = unpack(part("qweight"), raw["bits"], 0)
        zeros = unpack(part("qzeros"), raw["bits"], 1) + 1
        groups = part("g_idx").long()
        weight = part("scales").float()[groups] * (codes - zeros[groups])
        yield name, weight.T.contiguous()


def greedy(folder, **options):
    if "zero_point" in " ".join(load_file(folder / "model.safetensors")):
        # Left compressed, transformers makes room for unpacked zeros and refuses packed ones, also those that compressed-tensors packs itself.
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("A pod is the smallest", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(ids).logits.float()


def main(engine, work):
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, compressed-tensors {compressed_tensors.__version__}")
    wrong = 0
    for index, (layout, options) in enumerate(CASES):
        out = export(engine, work / f"{index}", layout, options)
        plain = export(engine, work / f"{index}-plain", "dequantised", options)
        reference, tensors = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
        names = linears(reference)
        read = decompress_ct if layout == "compressed-tensors" else dequantise_gptq
        weights, different = 0, 0
        for name, weight in read(out, tensors, names):
            expected = reference[name + ".weight"]
            weights += expected.numel()
            different += int((weight != expected).sum())
        rest = [name for name in reference if name.removesuffix(".weight") not in names]
        different += sum(int((reference[name] != tensors[name]).sum()) for name in rest)
        line = f"{layout} {' '.join(options)}: {len(names)} linears, {weights} weights, {different} differ"
        if layout == "compressed-tensors":
            logits, expected = greedy(out, dtype=torch.float32), greedy(plain, dtype=torch.float32)
            line += f"; transformers' logits: largest difference {float((logits - expected).abs().max()):.4f} of {float(expected.abs().max()):.1f}"
        print(line, flush=True)
        wrong += different
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
