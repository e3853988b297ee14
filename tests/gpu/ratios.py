"""Ours beside PyTorch, of the JSON lines that gpu_check and peer.py left. Exits with 1 where a goal is missed."""
import json
import sys

GOALS = {"resnet18 bf16 batch 512": 1.1, "vgg16 bf16 batch 512": 1.0, "resnet50 bf16 batch 256": 1.0, "resnet20 bf16 batch 128": 2,
         "lenet5 bf16 batch 128": 3, "smallcnn bf16 batch 128": 3}

rows = [json.loads(line) for line in open(sys.argv[1])]
ours = {r["bench"]: r["value"] for r in rows if "bench" in r}
peer = {r["peer"]: r["value"] for r in rows if "peer" in r}
missed = False
print(f"{'a training step':28} {'ours ms':>9} {'torch ms':>9} {'ratio':>6} {'goal':>5}")
for name, goal in GOALS.items():
    ratio = peer[name] / ours[name] if name in ours and name in peer else float("nan")
    held = ratio >= goal
    missed |= not held
    print(f"{name:28} {ours.get(name, float('nan')):9.3f} {peer.get(name, float('nan')):9.3f} {ratio:6.2f} {goal:5}"
          f"{'' if held else '  MISSED' if ratio == ratio else '  not measured'}")
sys.exit(missed)
