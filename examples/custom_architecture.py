"""Compresses a model class of your own that transformers does not have: register it, add a row, compress.

    python examples/custom_architecture.py OUT

The model here is small and random, and calibrated on text that it writes itself.
"""

import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from fips import CompressionConfig, FipsError, compress
from fips.models.arch import ArchSpec
from fips.models.archs import ARCHITECTURES


class WideMLP(torch.nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.widen = torch.nn.Linear(config.hidden_size, config.intermediate_size)
        self.narrow = torch.nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.widen(x).relu().square())


class WideConfig(LlamaConfig):
    model_type = "wide"


class WideForCausalLM(LlamaForCausalLM):
    config_class = WideConfig

    def __init__(self, config: WideConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = WideMLP(config)


AutoConfig.register("wide", WideConfig)
AutoModelForCausalLM.register(WideConfig, WideForCausalLM)
# Where the blocks are inside the base model, and which linears of a block read (up) and write (down) the model width.
ARCHITECTURES["wide"] = (ArchSpec("layers", up=("mlp.widen",), down=("mlp.narrow",)),)


def main(out: str) -> None:
    torch.manual_seed(0)
    config = WideConfig(vocab_size=384, hidden_size=64, intermediate_size=256, num_hidden_layers=4, bos_token_id=0)
    with tempfile.TemporaryDirectory() as source:
        WideForCausalLM(config).save_pretrained(source)
        ByT5Tokenizer().save_pretrained(source)
        print(compress(source, out, CompressionConfig(calibration="self", calibration_tokens=2048)).table())
    print(type(AutoModelForCausalLM.from_pretrained(out)).__name__)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2] or sys.exit(__doc__))
    except FipsError as error:
        sys.exit(f"Error: {error}")
