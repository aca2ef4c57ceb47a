# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on text, letter by letter, and let it write.

    fastps-run -np 2 python examples/gpt_text.py
    fastps-run -np 2 python examples/gpt_text.py --file book.txt --steps 2000

The text is the source of some modules of Python's library, unless --file names another. Each
worker draws its own pieces of it; gradients are averaged while backward() runs.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn

import fastps.torch as fps

LENGTH = 64  # letters that the model sees
MODULES = ("argparse", "ast", "heapq", "inspect", "statistics", "subprocess", "textwrap")


class GPT(nn.Module):
    """Predict the next letter at each place."""

    def __init__(self, letters: int, width: int, layers: int) -> None:
        """Make embeddings, blocks that see only the past, and the output layer."""
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next letter, [batch, place, letter]."""
        x = self.letter(text) + self.place(torch.arange(text.shape[1]))
        future = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.out(self.blocks(x, mask=future, is_causal=True))


@torch.no_grad()
def write(model: nn.Module, begin: torch.Tensor, count: int) -> list[int]:
    """Draw letters one by one, each after those before it."""
    text = begin
    for _ in range(count):
        scores = model(text[None, -LENGTH:])[0, -1]
        text = torch.cat([text, torch.multinomial(scores.softmax(0), 1)])
    return text.tolist()


def main() -> None:
    """Train, and print what the model writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, help="text to learn from")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="pieces of each worker in a step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    library = Path(sysconfig.get_path("stdlib"))
    files = [options.file] if options.file else [library / f"{name}.py" for name in MODULES]
    text = "".join(file.read_text() for file in files)
    letters = sorted(set(text))
    number = {letter: place for place, letter in enumerate(letters)}
    data = torch.tensor([number[letter] for letter in text])

    fps.init()
    torch.manual_seed(fps.rank())  # other pieces on each worker
    model = GPT(len(letters), options.width, options.layers)
    optimizer = fps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        named_parameters=model.named_parameters(),
    )
    fps.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(options.steps):
        begins = torch.randint(len(data) - LENGTH, (options.batch,)).tolist()
        pieces = torch.stack([data[one : one + LENGTH + 1] for one in begins])
        loss = nn.functional.cross_entropy(
            model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fps.rank() == 0 and step % 50 == 0:
            print(f"step {step}: {loss.item():.2f} nats a letter", flush=True)
    mean = fps.allreduce(loss.detach(), name="loss")
    print(f"worker {fps.rank()} of {fps.size()}: loss {mean.item():.4f} nats a letter")
    if fps.rank() == 0:
        print("".join(letters[one] for one in write(model, data[:8], 120)))
    fps.shutdown()


if __name__ == "__main__":
    main()
