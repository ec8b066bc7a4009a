"""Train a patched model that is sharded with FSDP2, in an own loop; on GPUs with NCCL, on a CPU with gloo.

    torchrun --nproc-per-node 2 examples/fsdp2.py [--steps 30] [--model config.json]

What is tigon's is one line, before the model is sharded. Layers are units of their own; the head stays with the root,
which FSDP2 keeps whole between forward and backward, so that the loss exchanges nothing that a native model would not.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import tigon

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def text() -> torch.Tensor:
    from pydoc_data.topics import topics

    joined = "\n".join(topics[key] for key in sorted(topics)).encode()
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", help="configuration, folder or hub id; default: a tiny Llama")
    args = parser.parse_args()

    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    config = TINY if args.model is None else AutoConfig.from_pretrained(args.model)
    with device:
        model = AutoModelForCausalLM.from_config(config)
    # This line is all there is to it.
    report = tigon.patch(model)
    if rank == 0:
        print(report)

    # In bf16 on a GPU; parameters, gradients and what the optimizer keeps stay in fp32.
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": precision} if has_gpus else {}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    tokens, length, batch = text(), 128, 8
    for step in range(args.steps):
        # Every rank reads other windows.
        first = (step * world_size + rank) * batch * length
        window = tokens[first % (len(tokens) - batch * length) :][: batch * length].view(batch, length).to(device)
        loss = model(input_ids=window, labels=window).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and (step % max(1, args.steps // 3) == 0 or step == args.steps - 1):
            print(f"step {step}  loss {float(mean) / world_size:.3f}", flush=True)

    # Names and shapes are those of the model without tigon.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"{len(state)} tensors to save")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
