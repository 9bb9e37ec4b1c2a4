"""One linear in every quantised layout, with the weights that it stands for.

Called by make.py. Writes layouts.safetensors, where the linear of a case is named as the case and `<case>.expected` holds its weights in FP32, and
layouts.json, which gives each case's quantization_config.

compressed-tensors cases are written and read back by the package of that name, and AWQ is read back by it; GPTQ and the block FP8 of
transformers are packed here from the facts of their layouts.
"""

import json

import numpy
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

SHAPE = (24, 64)


def compressed_tensors(name, layout, weight, **args):
    """What the package writes for `weight`, and what it reads back."""
    out, width = weight.shape
    arguments = QuantizationArgs(**args)
    activations = QuantizationArgs(num_bits=8, type=arguments.type, strategy="token", dynamic=True)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=arguments,
        input_activations=None if layout == "pack-quantized" else activations,
    )
    if args["strategy"] == "block":
        rows, columns = args["block_structure"]
        blocks = weight.reshape(out // rows, rows, width // columns, columns)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif args["strategy"] == "group":
        groups = weight.reshape(out, -1, args["group_size"])
        low, high = groups.amin(-1), groups.amax(-1)
    elif args["strategy"] == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    scale, zero = calculate_qparams(low, high, arguments)
    scale = scale.bfloat16()
    state = dict(weight=weight, weight_scale=scale.float())
    if not arguments.symmetric:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(layout)
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"].float()
    packed["weight_scale"] = scale
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=layout,
        ignore=["lm_head"],
        quantization_status="compressed",
    )
    return name, config.to_dict(), packed, expected


def act_order(name, random, weight, group):
    """4-bit symmetric groups whose inputs are scattered, as older versions of the package write them with actorder "group"."""
    out, width = weight.shape
    index = torch.from_numpy(random.permutation(numpy.arange(width) // group))
    scale = torch.stack([weight[:, index == one].abs().amax(1) / 7 for one in range(width // group)], 1).bfloat16()
    spread = scale.float()[:, index]
    codes = (weight / spread).round().clamp(-8, 7).to(torch.int8)
    tensors = dict(
        weight_packed=pack_to_int32(codes, 4),
        weight_scale=scale,
        weight_shape=torch.tensor(weight.shape),
        weight_g_idx=index.int(),
    )
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized").to_dict()
    # The package reads such checkpoints no longer.
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return name, config, tensors, codes.float() * spread


def pack(codes, bits):
    """Codes along the first axis into 32-bit words, the lowest bits first."""
    per_word = 32 // bits
    words = codes.reshape(-1, per_word, codes.shape[1]).astype(numpy.uint32)
    shifts = numpy.arange(per_word, dtype=numpy.uint32) * bits
    packed = (words << shifts[None, :, None]).sum(1, dtype=numpy.uint32)
    return torch.from_numpy(packed.view(numpy.int32).copy())


def gptq(name, random, bits, group, sym=True, stored=None, act_order=False, shape=SHAPE, **config):
    """Random weights; `stored` is what the file adds to zeros: -1 in version 1."""
    out, width = shape
    groups = width // group
    codes = random.integers(0, 1 << bits, (width, out))
    zeros = numpy.full((groups, out), 1 << (bits - 1)) if sym else random.integers(0, 1 << bits, (groups, out))
    scales = random.uniform(0.03, 0.05, (groups, out)).astype(numpy.float16)
    index = numpy.arange(width) // group
    if act_order:
        index = index[random.permutation(width)]
    expected = scales.astype(numpy.float32)[index] * (codes - zeros[index]).astype(numpy.float32)
    tensors = dict(
        qweight=pack(codes, bits),
        qzeros=pack(((zeros + stored) % (1 << bits)).T, bits).T.contiguous(),
        scales=torch.from_numpy(scales),
        g_idx=torch.from_numpy(index.astype(numpy.int32)),
    )
    config = dict(quant_method="gptq", bits=bits, group_size=group, sym=sym, desc_act=act_order) | config
    return name, config, tensors, torch.from_numpy(expected.T.copy())


def awq(name, random, group, shape=SHAPE):
    """Random weights."""
    out, width = shape
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack_columns(codes):
        words = codes.reshape(codes.shape[0], -1, 8)[:, :, order]
        return pack(words.reshape(-1, 8).T, 4).reshape(codes.shape[0], -1)

    codes = random.integers(0, 16, (width, out))
    zeros = random.integers(0, 16, (width // group, out))
    scales = torch.from_numpy(random.uniform(0.03, 0.05, (width // group, out)).astype(numpy.float16))
    tensors = dict(qweight=pack_columns(codes), qzeros=pack_columns(zeros), scales=scales)
    config = dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm")
    converted = AutoAWQConverter(group_size=group, ignore=[]).process(
        {f"x.{key}": tensor.clone().contiguous() for key, tensor in tensors.items()}
    )
    converted = {key.removeprefix("x."): tensor for key, tensor in converted.items()}
    converted["weight_scale"] = converted["weight_scale"].float()
    weights = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    expected = BaseCompressor.get_value_from_registry("pack-quantized").decompress(converted, scheme)["weight"]
    return name, config, tensors, expected.float()


def fp8_block(name, weight, block):
    out, width = weight.shape
    blocks = weight.reshape(out // block, block, width // block, block)
    inverse = blocks.abs().amax((1, 3)) / 448.0
    spread = inverse.repeat_interleave(block, 0).repeat_interleave(block, 1)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    tensors = dict(weight=codes, weight_scale_inv=inverse)
    config = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[block, block])
    return name, config, tensors, codes.float() * spread


def cases():
    torch.manual_seed(1)
    random = numpy.random.default_rng(1)
    weight = torch.randn(SHAPE)
    shifted = weight + 0.7
    four = dict(num_bits=4, type="int")
    eight = dict(num_bits=8, type="int")
    float8 = dict(num_bits=8, type="float", symmetric=True)
    yield compressed_tensors("ct-w8a8", "int-quantized", weight, **eight, symmetric=True, strategy="channel")
    yield compressed_tensors("ct-w8a8-tensor", "int-quantized", weight, **eight, symmetric=True, strategy="tensor")
    yield compressed_tensors("ct-w8a8-asym", "int-quantized", shifted, **eight, symmetric=False, strategy="channel")
    yield compressed_tensors(
        "ct-w4a16", "pack-quantized", weight, **four, symmetric=True, strategy="group", group_size=32
    )
    yield compressed_tensors("ct-w4a16-channel", "pack-quantized", weight, **four, symmetric=True, strategy="channel")
    yield compressed_tensors(
        "ct-w4a16-asym", "pack-quantized", shifted, **four, symmetric=False, strategy="group", group_size=16
    )
    yield compressed_tensors(
        "ct-w8a16", "pack-quantized", shifted, **eight, symmetric=False, strategy="group", group_size=32
    )
    yield compressed_tensors("ct-fp8", "float-quantized", weight, **float8, strategy="channel")
    yield compressed_tensors("ct-fp8-tensor", "float-quantized", weight, **float8, strategy="tensor")
    yield compressed_tensors("ct-fp8-block", "float-quantized", weight, **float8, strategy="block", block_structure=[8, 16])
    yield fp8_block("fp8-block", weight, 8)
    yield gptq("gptq-v1", random, 4, 32, stored=-1)
    yield gptq("gptq-v1-asym", random, 4, 16, sym=False, stored=-1, checkpoint_format="gptq")
    yield gptq("gptq-v2-asym", random, 4, 16, sym=False, stored=0, checkpoint_format="gptq_v2")
    yield gptq("gptq-v2-that-says-v1", random, 4, 32, stored=0, checkpoint_format="gptq")
    yield gptq("gptq-v1-that-says-v2", random, 4, 32, stored=-1, checkpoint_format="gptq_v2")
    yield gptq("gptq-act-order", random, 4, 16, stored=-1, act_order=True)
    yield gptq("gptq-act-order-asym-8-bit", random, 8, 16, sym=False, stored=-1, act_order=True)
    yield gptq("gptq-8-bit", random, 8, 64, stored=-1)
    yield awq("awq", random, 32)
    yield act_order("ct-w4a16-act-order", random, weight, 16)


def write(directory):
    tensors, configs = {}, {}
    for name, config, packed, expected in cases():
        for key, tensor in packed.items():
            tensors[f"{name}.{key}"] = tensor.contiguous()
        tensors[f"{name}.expected"] = expected.contiguous()
        configs[name] = config
    save_file(tensors, directory / "layouts.safetensors")
    (directory / "layouts.json").write_text(json.dumps(configs, default=str) + "\n")
