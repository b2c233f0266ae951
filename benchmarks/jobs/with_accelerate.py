"""The job in Accelerate, which leaves stopping, averaging, the best file and the search for a rate to the user."""

import csv
import math
import pathlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from parts import make_model, test, train
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
folder = pathlib.Path("runs/accelerate")
folder.mkdir(parents=True, exist_ok=True)
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=8)


def prepared(lr=1e-3):
    model = make_model()
    loader = DataLoader(TensorDataset(*train), batch_size=8, shuffle=True)
    return accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=lr), loader)


model, optimizer, loader = prepared()
held_out = accelerator.prepare(DataLoader(TensorDataset(*test), batch_size=256))
average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.99))
best, waited, steps = 0.0, 0, 0
with (folder / "log.csv").open("w", newline="") as file:
    log = csv.writer(file)
    for _ in range(100):
        model.train()
        for inputs, target in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.update_parameters(accelerator.unwrap_model(model))
                steps += 1
                log.writerow([steps, loss.item(), ""])
        average.eval()
        hits = []
        for inputs, target in held_out:
            with torch.no_grad():
                hit = average(inputs).argmax(1) == target
            hits.append(accelerator.gather_for_metrics(hit))
        accuracy = torch.cat(hits).float().mean().item()
        log.writerow([steps, "", accuracy])
        if accuracy > best:
            best, waited = accuracy, 0
            accelerator.save(average.module.state_dict(), folder / "best.pt")
        else:
            waited += 1
        if waited == 5:
            break
print("best accuracy", best, "of", steps, "steps")
model, optimizer, loader = prepared(1e-7)
rates, losses, mean = [], [], 0.0
for inputs, target in loader:
    loss = cross_entropy(model(inputs), target)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean = 0.9 * mean + 0.1 * loss.item()
    rates.append(optimizer.param_groups[0]["lr"])
    losses.append(mean / (1 - 0.9 ** len(rates)))
    optimizer.param_groups[0]["lr"] *= 1e7 ** (1 / 99)
    if len(rates) == 100 or losses[-1] > 4 * min(losses) or math.isnan(losses[-1]):
        break
falls = [later - earlier for earlier, later in zip(losses[10:], losses[11:], strict=False)]  # noqa: RUF007
print("suggested rate", rates[10 + falls.index(min(falls))])
