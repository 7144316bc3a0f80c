"""Trains a small network on a GPU, and writes the loss of each step, bit for bit: train.py FILE STEPS."""
import os
import struct
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
from torch import nn

torch.use_deterministic_algorithms(True)
torch.manual_seed(7)
device = torch.device("cuda")
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(32 * 16 * 16, 512), nn.GELU(), nn.Linear(512, 10)
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator(device=device)
generator.manual_seed(11)
with open(sys.argv[1], "w") as out:
    for step in range(int(sys.argv[2])):
        x = torch.randn(64, 3, 16, 16, device=device, generator=generator)
        y = (x.mean(dim=(1, 2, 3)) * 1000).long() % 10
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        out.write(struct.pack(">f", loss.item()).hex() + "\n")
        out.flush()
        beat = os.environ.get("BELAY_TEST_BEAT")
        if beat:
            fd = os.open(beat, os.O_WRONLY | os.O_CREAT, 0o666)
            os.pwrite(fd, b"%019d\n" % step, 0)
            os.close(fd)
print("PASS train")
