"""The peer of benchmarks/train_step: one full fine-tuning step with transformers v5, as one JSON line on standard output.

Plain by default; --compile compiles every decoder layer; --liger applies liger-kernel's patches (when it is importable).
Same shapes, random tokens, labels = input_ids, AdamW (fused) without clipping, optimizer step counted. tokens_per_s_per_gpu is
from the median of whole steps; the phases are from further steps that also wait between phases.
"""

import argparse
import json
import math
import pathlib
import resource
import statistics
import time

import torch
import transformers


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=pathlib.Path(__file__).parent.parent / "shapes.json")
    parser.add_argument("--shape", default="tiny_qwen3_moe")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--routing", default="model", choices=["model", "skewed"])
    parser.add_argument("--documents", type=int, default=0, help="mean tokens of the documents packed into a row")
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "flex_attention"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--liger", action="store_true")
    return parser.parse_args()


def make_model(args, device):
    values = json.loads(pathlib.Path(args.shapes).read_text())[args.shape]
    if args.layers:
        values["num_hidden_layers"] = args.layers
    model_type = values.pop("model_type")
    if args.liger:
        import liger_kernel.transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{model_type}")()
    config = transformers.AutoConfig.for_model(model_type, **values, use_cache=False)
    if model_type == "qwen3_moe":
        config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=args.attention, dtype=getattr(torch, args.dtype)
        )
    if args.routing == "skewed":
        skew_routing(model)
    model.train()
    if args.recompute == "full":
        model.gradient_checkpointing_enable()
    return model


def document_lengths(args):
    """Of all rows; the same numbers as document_lengths in benchmarks/train_step.cpp."""
    if args.documents == 0:
        return [args.seq] * args.micro_batch
    lengths, u = [], 0.0
    for _ in range(args.micro_batch):
        left = args.seq
        while left > 0:
            u = math.fmod(u + 0.6180339887498949, 1.0)
            length = min(max(int(-args.documents * math.log(1 - u)), 2), max(left, 2))
            if left - length == 1:
                length += 1
            lengths.append(length)
            left -= length
    return lengths


def make_batch(args, vocab_size, device):
    """What the model is called with. Packed documents are told apart by their position_ids."""
    ids = torch.randint(0, vocab_size, (args.micro_batch, args.seq), device=device)
    if args.documents == 0:
        return dict(input_ids=ids, labels=ids)
    positions = torch.cat([torch.arange(length) for length in document_lengths(args)]).view(ids.shape).to(device)
    return dict(input_ids=ids, labels=ids.masked_fill(positions == 0, -100), position_ids=positions)


def skew_routing(model):
    """As skew_routing in benchmarks/train_step.cpp: the busiest of 128 experts gets 4 times the mean."""
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            ramp = (torch.arange(weight.shape[0], device=weight.device, dtype=torch.float32) / (weight.shape[0] - 1)) ** 8
            weight.data.mul_((1 + 1.75 * ramp).unsqueeze(1).to(weight.dtype))


@torch.no_grad()
def busiest_over_mean(model, args, batch):
    """Rows of the busiest expert over the mean, the mean of all layers, on the first document. 0 without experts."""
    top_k = getattr(model.config, "num_experts_per_tok", 0)
    if not top_k:
        return 0.0
    found = []

    def count(module, inputs, outputs):
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        counts = torch.bincount(logits.topk(top_k).indices.flatten(), minlength=logits.shape[-1]).double()
        found.append((counts.max() / counts.mean()).item())

    hooks = [layer.mlp.gate.register_forward_hook(count) for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    model.model(input_ids=batch["input_ids"][:1, : document_lengths(args)[0]])
    for hook in hooks:
        hook.remove()
    return statistics.mean(found)


def main():
    args = arguments()
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = make_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = make_batch(args, model.config.vocab_size, device)
    busiest = busiest_over_mean(model, args, batch)
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if args.compile:
        for layer in model.model.layers:
            layer.compile()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def step(phases):
        marks = [time.perf_counter()]

        def mark():
            if phases:
                synchronize()
                marks.append(time.perf_counter())

        loss = model(**batch).loss
        mark()
        loss.backward()
        mark()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mark()
        return loss, [1e3 * (b - a) for a, b in zip(marks, marks[1:])]

    first_loss = None
    for _ in range(args.warmup):
        loss = step(False)[0].item()
        first_loss = loss if first_loss is None else first_loss
    whole, phases = [], []
    for _ in range(args.steps):
        synchronize()
        begin = time.perf_counter()
        loss, _ = step(False)
        synchronize()
        whole.append(1e3 * (time.perf_counter() - begin))
    for _ in range(args.steps):
        phases.append(step(True)[1])
    medians = [round(statistics.median(times), 2) for times in zip(*phases)]
    free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step_ms = statistics.median(whole)
    print(
        json.dumps(
            dict(
                system="transformers"
                + ("+compile" if args.compile else "")
                + ("+liger" if args.liger else "")
                + ("+flex" if args.attention == "flex_attention" else ""),
                shape=args.shape,
                layers=model.config.num_hidden_layers,
                world=1,
                ep_size=1,
                micro_batch=args.micro_batch,
                seq=args.seq,
                dtype=args.dtype,
                recompute=args.recompute,
                fused_backward=False,
                routing=args.routing,
                busiest_over_mean=round(busiest, 2),
                num_documents=len(document_lengths(args)),
                num_trained_tokens=args.micro_batch * args.seq - len(document_lengths(args)),
                tokens_per_s_per_gpu=round(args.micro_batch * args.seq / step_ms * 1e3),
                step_ms=round(step_ms, 2),
                fwd_ms=medians[0],
                bwd_ms=medians[1],
                opt_ms=medians[2],
                peak_gib=round(peak / 2**30, 2),
                device_gib=round((total - free) / 2**30, 2),
                first_loss=first_loss and round(first_loss, 4),
                loss=round(loss.item(), 4),
            )
        )
    )


if __name__ == "__main__":
    main()
