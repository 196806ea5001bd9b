"""The peer of benchmarks/train_step: one full fine-tuning step with transformers v5, as one JSON line on standard output.

Plain by default; --compile compiles every decoder layer; --liger applies liger-kernel's patches (when it is importable).
Same shapes, random tokens, labels = input_ids, AdamW (fused) without clipping, optimizer step counted. tokens_per_s_per_gpu is
from the median of whole steps; the phases are from further steps that also wait between phases.
"""

import argparse
import json
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
            config, attn_implementation="sdpa", dtype=getattr(torch, args.dtype)
        )
    model.train()
    if args.recompute == "full":
        model.gradient_checkpointing_enable()
    if args.compile:
        for layer in model.model.layers:
            layer.compile()
    return model


def main():
    args = arguments()
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = make_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (args.micro_batch, args.seq), device=device)
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def step(phases):
        marks = [time.perf_counter()]

        def mark():
            if phases:
                synchronize()
                marks.append(time.perf_counter())

        loss = model(input_ids=ids, labels=ids).loss
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
                system="transformers" + ("+compile" if args.compile else "") + ("+liger" if args.liger else ""),
                shape=args.shape,
                layers=model.config.num_hidden_layers,
                world=1,
                ep_size=1,
                micro_batch=args.micro_batch,
                seq=args.seq,
                dtype=args.dtype,
                recompute=args.recompute,
                fused_backward=False,
                routing="model",
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
