"""PyTorch's milliseconds for the models of gpu_check: channels_last, bf16 autocast, torch.compile, data on the device.
Prints one JSON object a line: {"peer": "resnet18 bf16 batch 512", "value": 12.3, "unit": "ms"}."""
import json
import sys

import torch
import torch.nn.functional as F

from torch_models import MODELS, seconds_of

# Pictures of a step.
CASES = {"lenet5": 128, "smallcnn": 128, "resnet20": 128, "resnet18": 512, "vgg16": 512, "resnet50": 256}


def main():
    torch.backends.cudnn.benchmark = True
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name()}), flush=True)
    for name, batch in CASES.items():
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        make, shape, _ = MODELS[name]
        model = make().cuda().to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        x = torch.full((batch, *shape), 0.1, device="cuda").to(memory_format=torch.channels_last)
        labels = torch.zeros(batch, dtype=torch.long, device="cuda")
        compiled = torch.compile(model, mode=sys.argv[1] if len(sys.argv) > 1 else "max-autotune-no-cudagraphs"
                                 if shape[1] > 100 else "reduce-overhead")

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(compiled(x), labels)
            loss.backward()
            optimizer.step()

        seconds = seconds_of(step, 10, 7, 5 if shape[1] > 100 else 50)
        row = {"peer": f"{name} bf16 batch {batch}", "value": 1e3 * seconds, "unit": "ms"}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
