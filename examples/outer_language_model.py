"""A causal language model of Hugging Face's, trained on islands that exchange every 20 steps.

torchrun --standalone --nproc-per-node 2 examples/outer_language_model.py

Islands that come and go: start it on each, without torchrun, with a place to meet, such as
``tcp://HOST:29400``, where ``sparcel meet`` runs, or a folder or bucket that all reach.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config

import sparcel.outer

CONTEXT, BATCH, STEPS, EVERY = 64, 8, 200, 20

parser = argparse.ArgumentParser()
parser.add_argument("--islands", help="where islands meet that come and go")
place = parser.parse_args().islands
if place is None:
    dist.init_process_group("gloo")
    place, island = dist.group.WORLD, dist.get_rank()
else:
    island = os.getpid()

# The text is that of Python's own library, as bytes.
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:50]
text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)

torch.manual_seed(0)  # islands begin with the same parameters
config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2)
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
outer = sparcel.outer.attach(model, optimizer, every=EVERY, islands=place)

generator = torch.Generator().manual_seed(island)  # each island reads other passages
for step in range(STEPS):
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
    tokens = torch.stack([text[start : start + CONTEXT] for start in starts.tolist()]).long()
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}, loss {loss.item():.2f}")

weights = sum(p.double().sum() for p in outer.shared.values()).item()
sent = outer.stats().bytes_sent
print(f"{outer.steps} outer steps, loss {loss.item():.2f}, weights {weights!r}, {sent} bytes sent")
outer.close()
if dist.is_initialized():
    dist.destroy_process_group()
