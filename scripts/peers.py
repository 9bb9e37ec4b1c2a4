"""Measures mixquant-engine beside llama.cpp, torch and mistral.rs: the same weights, one thread, the same core, taking turns.

`scripts/bench` calls it: `convert` makes GGUF files of a checkpoint that `mixquant-engine bench --write` made, `compare` starts every program once,
asks one after the other for a round of samples, and prints the tables of docs/benchmarks.md. The other commands are what `compare` starts: each
loads its weights, then answers a line on standard input with a line of JSON, the seconds of each sample. It never installs anything.
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

# Positions of decode's first token and tokens that one sample decodes, as `mixquant-engine bench` has them.
CONTEXT, STEPS = 128, 8
# The types that peers are measured in, by the names that GGUF gives them.
GGUF_TYPES = ("BF16", "Q8_0", "Q4_0")
# Our scheme, and the peers that are nearest to it in bits.
NEAREST = {
    "BF16": ("torch BF16", "llama.cpp BF16"),
    "W8A8": ("llama.cpp Q8_0", "mistral.rs Q8_0"),
    "W4A16-g128": ("llama.cpp Q4_0",),
}


def timed(work):
    """Runs `work` and returns its seconds, on the wall and of computing."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def answer(prefill, decode, lengths):
    """Answers requests for rounds until there are no more."""
    for length in (*lengths, CONTEXT):
        prefill(length)
    decode()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        samples = [prefill(length) for length in lengths] + [decode()]
        print(json.dumps(samples), flush=True)


# ---- GGUF files ------------------------------------------------------------------------------------------------------------------------------


def tensors(directory):
    """Names, shapes and BF16 bits of a checkpoint in one file."""
    import numpy

    path = pathlib.Path(directory, "model.safetensors")
    data = numpy.memmap(path, mode="r", dtype=numpy.uint8)
    length = int.from_bytes(data[:8].tobytes(), "little")
    for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        yield name, data[start:end].view(numpy.uint16).reshape(entry["shape"])


def gguf_name(name):
    """A tensor's name in GGUF."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, part, *rest = name.split(".")
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up"}
    parts |= {"down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    return f"blk.{layer}.{parts[rest[0] if rest[0] in parts else part]}.weight"


def vocabulary(size):
    """Bytes and words that no model was trained on: programs that take no token ids need some text for each."""
    texts = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    words = [f"\u2581w{index}" for index in range(size - len(texts))]
    return texts + words, kinds + [1] * len(words), [-1.0 - index / size for index in range(size)]


def convert(options):
    """Writes `DIRECTORY/TYPE.gguf` for each type; norms stay FP32, every matrix gets the type."""
    import gguf
    import numpy

    config = json.loads(pathlib.Path(options.checkpoint, "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for kind in options.types:
        out = pathlib.Path(options.checkpoint, f"{kind}.gguf")
        if out.exists():
            continue
        writer = gguf.GGUFWriter(str(out) + ".part", "llama")
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["hidden_size"] // heads)
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
        texts, kinds, scores = vocabulary(config["vocab_size"])
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_types(kinds)
        writer.add_token_scores(scores)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, bits in tensors(options.checkpoint):
            values = (bits.astype(numpy.uint32) << 16).view(numpy.float32)
            if values.ndim == 1:
                writer.add_tensor(gguf_name(name), values)
                continue
            for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
                if part in name:
                    # Rotary pairs lie side by side in GGUF and half a head apart in the checkpoint.
                    pairs = values.reshape(count, 2, -1, values.shape[1])
                    values = numpy.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
            to = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, to), raw_dtype=to)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(str(out) + ".part", out)


# ---- The peers -------------------------------------------------------------------------------------------------------------------------------


def llama(options):
    """llama.cpp through the C interface of llama-cpp-python; keys and values in F16, flash attention as it chooses."""
    import llama_cpp as api

    silence = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(silence, ctypes.c_void_p())
    api.llama_backend_init()
    model = api.llama_model_load_from_file(options.weights.encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx = max(*options.prefill, CONTEXT + STEPS) + 64
    settings.n_batch, settings.n_ubatch = 2048, 512
    settings.n_threads = settings.n_threads_batch = 1
    context = api.llama_init_from_model(model, settings) if model else None
    if not context:
        sys.exit(f"{options.weights}: llama.cpp cannot load it")
    memory, batch = api.llama_get_memory(context), api.llama_batch_init(2048, 0, 1)
    vocabulary_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def evaluate(first, count):
        batch.n_tokens = count
        for index in range(count):
            batch.token[index] = 300 + index * 37 % (vocabulary_size - 300)
            batch.pos[index], batch.n_seq_id[index], batch.seq_id[index][0] = first + index, 1, 0
            batch.logits[index] = index == count - 1
        if api.llama_decode(context, batch):
            sys.exit(f"{options.weights}: llama.cpp cannot evaluate {count} tokens")
        api.llama_synchronize(context)

    def prefill(length):
        api.llama_memory_clear(memory, False)
        return timed(lambda: evaluate(0, length))

    def decode():
        prefill(CONTEXT)
        return timed(lambda: [evaluate(CONTEXT + step, 1) for step in range(STEPS)])

    answer(prefill, decode, options.prefill)


def torch(options):
    """torch through transformers, in BF16."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(options.weights, dtype=torch.bfloat16).eval()
    tokens = torch.arange(1, max(*options.prefill, CONTEXT) + 1).unsqueeze(0)

    @torch.inference_mode()
    def run(ids, cache=None):
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    def prefill(length):
        return timed(lambda: run(tokens[:, :length]))

    def decode():
        cache = run(tokens[:, :CONTEXT])
        return timed(lambda: [run(tokens[:, :1], cache) for _ in range(STEPS)])

    answer(prefill, decode, options.prefill)


def mistral(options):
    """mistral.rs on a GGUF file. It takes text alone and tells its own times, so a sample is scaled from the tokens that it counted."""
    from mistralrs import CompletionRequest, Runner, Which

    path = pathlib.Path(options.weights)
    which = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
    runner = Runner(which=which, prefix_cache_n=0)
    words = 0

    def ask(length, generated):
        nonlocal words
        words += 1
        prompt = " ".join(f"w{(words * 7919 + index * 37) % 9999}" for index in range(length - 1))
        request = CompletionRequest(prompt=prompt, model="default", max_tokens=generated, temperature=0.0, ignore_eos=True)
        reply = []
        seconds = timed(lambda: reply.append(runner.send_completion_request(request)))
        return reply[0].usage, seconds["cpu"] / seconds["wall"]

    def sample(seconds, tokens, wanted, share):
        wall = seconds / tokens * wanted
        return {"wall": wall, "cpu": wall * share}

    def prefill(length):
        usage, share = ask(length, 1)
        return sample(usage.total_prompt_time_sec, usage.prompt_tokens, length, share)

    def decode():
        usage, share = ask(CONTEXT, STEPS + 1)
        return sample(usage.total_completion_time_sec, usage.completion_tokens, STEPS, share)

    answer(prefill, decode, options.prefill)


# ---- Taking turns ----------------------------------------------------------------------------------------------------------------------------


class Program:
    """A program that holds its weights and answers requests for samples."""

    def __init__(self, name, command, core):
        self.name, self.rounds = name, []
        environment = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )

    def read(self):
        """The next line of JSON; programs print other things too."""
        for line in self.process.stdout:
            if line.startswith(("[", "{")):
                return json.loads(line)
        raise SystemExit(f"{self.name}: stopped with {self.process.wait()}: run its command by hand to see why: {self.process.args}")

    def round(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.rounds.append(self.read())

    def rates(self, cell, tokens, clock="cpu"):
        return [tokens / samples[cell][clock] for samples in self.rounds]


def programs(options):
    """Ours by scheme, and the peers, as far as they are wanted."""
    core = max(os.sched_getaffinity(0))
    lengths = ",".join(map(str, options.prefill))
    weights = pathlib.Path(options.checkpoint)
    engine = [options.engine, "bench", "--model", options.checkpoint, "--threads", "1", "--prefill", lengths, "--context", str(CONTEXT)]
    engine += ["--steps", str(STEPS), "--sample-milliseconds", "0", "--on-request", "--schemes"]
    ours = {scheme: [*engine, scheme] for scheme in NEAREST}
    peers = {f"llama.cpp {kind}": ("llama", weights / f"{kind}.gguf") for kind in GGUF_TYPES}
    peers |= {"torch BF16": ("torch", weights), "mistral.rs Q8_0": ("mistral", weights / "Q8_0.gguf")}
    peers = {name: [sys.executable, __file__, kind, str(path), "--prefill", lengths] for name, (kind, path) in peers.items()}
    wanted = options.only or [*ours, *peers]
    if unknown := set(wanted) - set(ours) - set(peers):
        sys.exit(f"{', '.join(unknown)}: no such program: write some of {', '.join([*ours, *peers])}")
    all_of = (ours, peers)
    return tuple([Program(name, command, core) for name, command in each.items() if name in wanted] for each in all_of)


def versions():
    from importlib import metadata

    names = ("llama-cpp-python", "torch", "transformers", "mistralrs")
    found = {package.name: package.version for package in metadata.distributions()}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def table(options, ours, peers):
    """Tokens a second of computing: medians, with the lowest and highest."""
    cells = [(f"prefill {length}", length) for length in options.prefill] + [(f"decode at {CONTEXT}", STEPS)]
    print(f"median of {options.rounds} rounds (lowest to highest), tokens a second of computing; load {os.getloadavg()[0]:.1f}; {versions()}\n")
    print("| program and weights | " + " | ".join(name for name, _ in cells) + " |")
    print("| --- " * (len(cells) + 1) + "|")
    for program in (*ours, *peers):
        name = f"MixQuant {program.name}" if program in ours else program.name
        shown = []
        for cell, (_, tokens) in enumerate(cells):
            rates = program.rates(cell, tokens)
            shown.append(f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})")
        print(f"| {name} | " + " | ".join(shown) + " |")
    return cells


def ratios(cells, ours, peers):
    """Ours over each peer, round by round: what disturbed one of a round disturbed the others."""
    by_name = {program.name: program for program in peers}
    print("\n| MixQuant over | " + " | ".join(name for name, _ in cells) + " |")
    print("| --- " * (len(cells) + 1) + "|")
    for program in ours:
        # Any peer is a prompt's rival; a token's is the one that reads as many bytes.
        nearest = [by_name[name] for name in NEAREST[program.name] if name in by_name]
        for peer in peers if program.name == "W8A8" else nearest:
            shown = []
            for cell, (name, tokens) in enumerate(cells):
                if name.startswith("decode") and peer.name not in NEAREST[program.name]:
                    shown.append("")
                    continue
                pairs = zip(program.rates(cell, tokens), peer.rates(cell, tokens))
                shown.append(f"{statistics.median(one / other for one, other in pairs):.2f}")
            print(f"| {program.name} : {peer.name} | " + " | ".join(shown) + " |")


def compare(options):
    ours, peers = programs(options)
    everyone = [*ours, *peers]
    for program in everyone:
        program.read()
    for index in range(options.rounds):
        for program in everyone:
            program.round()
        print(f"round {index + 1} of {options.rounds}", file=sys.stderr)
    for program in everyone:
        program.process.stdin.close()
        program.process.wait()
    ratios(table(options, ours, peers), ours, peers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(name, run, argument):
        own = commands.add_parser(name)
        own.add_argument(argument)
        own.set_defaults(run=run)
        return own

    def lengths(text):
        return [int(part) for part in text.split(",")]

    command("convert", convert, "checkpoint").add_argument("--types", nargs="+", default=GGUF_TYPES)
    own = command("compare", compare, "checkpoint")
    own.add_argument("--engine", required=True)
    own.add_argument("--rounds", type=int, default=7)
    own.add_argument("--only", nargs="+", metavar="PROGRAM", help="instead of all: such as W8A8 'torch BF16'")
    own.add_argument("--prefill", type=lengths, default=[512, 2048])
    for name, run in (("llama", llama), ("torch", torch), ("mistral", mistral)):
        command(name, run, "weights").add_argument("--prefill", type=lengths, required=True)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
