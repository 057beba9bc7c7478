"""Lightning under `srun ft-run`: its trainer, and a callback that makes each batch a safe point.

Lightning can requeue a job by itself (SLURMEnvironment with its default auto_requeue=True), on
USR1 and without agreement between ranks; ft-run sees that and leaves it alone. Here that is off,
and the session does it: on any signal to any rank, at the same step on all, and also where only
SIGTERM comes.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import slurm_ft

SAMPLES = 512  # of the data set


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Order(Sampler):
    """This rank's share of each epoch's order, from the place where the job was stopped.

    Lightning goes on in the middle of an epoch, but its own sampler would begin with the epoch's
    first samples once more.
    """

    def __init__(self, local_batch: int) -> None:
        self.local_batch, self.epoch, self.position = local_batch, 0, {}

    def set_epoch(self, epoch: int) -> None:  # Lightning calls it
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES // dist.get_world_size()

    def __iter__(self):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        batch = self.local_batch * dist.get_world_size()
        first = self.position["index"] if self.position.get("epoch") == self.epoch else 0
        for start in range(first, SAMPLES, batch):
            mine = start + self.local_batch * dist.get_rank()
            yield from order[mine : mine + self.local_batch].tolist()


class SafePoints(L.Callback):
    """Tells the session of each step."""

    def __init__(self, ft, batch: int) -> None:
        self.ft, self.batch, self.seen = ft, batch, None

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == self.seen:  # the gradient was only accumulated
            return
        self.seen = trainer.global_step
        if trainer.is_global_zero:
            print(f"step {self.seen} loss {outputs['loss'].item():.6f}", flush=True)
        position = {"epoch": trainer.current_epoch, "index": (index + 1) * self.batch}
        self.ft.step(self.seen, samples=self.batch, position=position)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--local-batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    # Lightning takes a group that is there already; the session needs it before fit().
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    ranks = dist.get_world_size()

    L.seed_everything(0)
    x = torch.randn(SAMPLES, 32)
    order = Order(args.local_batch)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), args.local_batch, sampler=order)
    model = Model()
    trainer = L.Trainer(
        max_epochs=args.epochs,
        num_nodes=args.num_nodes,
        devices=ranks // args.num_nodes,
        strategy="ddp",
        accelerator="auto",
        plugins=[SLURMEnvironment(auto_requeue=False)],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )

    resume: list[Path] = []
    with slurm_ft.session(
        save=lambda directory, step: trainer.save_checkpoint(directory / "lightning.ckpt"),
        restore=lambda directory, step: resume.append(directory / "lightning.ckpt"),
        total_steps=args.epochs * SAMPLES // (ranks * args.local_batch),
    ) as ft:
        ft.restore()
        order.position = dict(ft.position)
        trainer.callbacks.append(SafePoints(ft, ranks * args.local_batch))
        trainer.fit(model, data, ckpt_path=str(resume[0]) if resume else None)

    weight = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps, weight {weight:.9f}", flush=True)


if __name__ == "__main__":
    main()
