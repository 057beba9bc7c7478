"""Hugging Face Trainer under ft-run: a callback makes each step a safe point.

The session writes what the Trainer itself would write into a checkpoint, so the Trainer's own
`resume_from_checkpoint` reads it. Its own regular saving is off: one of the two is enough.
"""

import argparse
from pathlib import Path

import torch
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import slurm_ft


class SafePoints(TrainerCallback):
    """Tells the session of each step."""

    def __init__(self, ft, batch: int) -> None:
        self.ft, self.batch = ft, batch

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(f"step {state.global_step}", flush=True)
        self.ft.step(state.global_step, samples=self.batch)


class Texts(torch.utils.data.Dataset):
    """Made from their numbers: the label is whether a token occurs."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(4, 60, (16,), generator=generator)
        return {"input_ids": ids, "labels": int((ids == 7).any())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--output_dir", default="out")
    given = parser.parse_args()

    args = TrainingArguments(
        output_dir=given.output_dir,
        num_train_epochs=given.num_train_epochs,
        per_device_train_batch_size=given.per_device_train_batch_size,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        seed=0,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
    )
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=2,
    )
    trainer = Trainer(
        model=RobertaForSequenceClassification(config), args=args, train_dataset=Texts()
    )

    def save(directory: Path, step: int) -> None:
        if not trainer.is_world_process_zero():
            return
        trainer.save_model(str(directory))
        torch.save(trainer.optimizer.state_dict(), directory / "optimizer.pt")
        torch.save(trainer.lr_scheduler.state_dict(), directory / "scheduler.pt")
        trainer.state.save_to_json(str(directory / "trainer_state.json"))

    resume: list[str] = []
    # The Trainer has made the process group by now.
    with slurm_ft.session(
        save=save, restore=lambda directory, step: resume.append(str(directory))
    ) as ft:
        ft.restore()
        trainer.add_callback(SafePoints(ft, args.train_batch_size * args.world_size))
        trainer.train(resume_from_checkpoint=resume[0] if resume else None)

    weight = sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters())
    if trainer.is_world_process_zero():
        print(f"trained {trainer.state.global_step} steps, weight {weight:.9f}", flush=True)


if __name__ == "__main__":
    main()
