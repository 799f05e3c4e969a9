"""A discrete tokenizer: each patch of an image becomes one of K visual tokens, from which the image is painted again.

A vector-quantised auto-encoder. With unit encodings z of the patches, unit codes c₁ … c_K and sg = "no gradient here",

    token = argmax_k z·c_k,     q = c_token,     loss = ‖x − decoder(z + sg(q − z))‖² / pixels + β ‖z − sg(q)‖²

The codes are running means of the encodings that chose them (spherical k-means), and a code that hardly any patch
chooses starts anew at an encoding that is far from its code, drawn in proportion to the squared distance (k-means++).
In the beginning all codes are unused, so that the first batch makes the codebook.

Source: van den Oord et al. 2017, "Neural Discrete Representation Learning"; unit codes as in Yu et al. 2022,
"Vector-quantized Image Modeling with Improved VQGAN".

B images, N patches, K codes, d width of a code.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.core.errors import InputError
from sightline.core.schedules import Progress
from sightline.training.collectives import gather, total
from sightline.training.objective import Learner, Views

PATCHES = (4, 8, 16, 32)
CODE_WIDTH = 16
COMMITMENT = 0.05  # β; pixels have a variance between 0.2 and 1, encodings of length one
DECAY = 0.95  # of the running means
DEAD = 0.1  # a code is dead if it is used less than this share of the mean use


class Tokenizer(Learner):
    """Patches to visual tokens and back; fulfils the contract of an objective, so that the loop trains it.

    >>> tokens = Tokenizer(patch=8, codes=32, width=16).encode(torch.zeros(2, 3, 48, 48))
    >>> tokens.shape, tokens.dtype
    (torch.Size([2, 36]), torch.int64)
    """

    codebook: Tensor  # (K, d), of length one
    sums: Tensor  # (K, d), running sum of the encodings that chose a code
    use: Tensor  # (K,), running number of them
    step_sums: Tensor  # the same of this step alone
    step_use: Tensor
    spares: Tensor  # (K, d), encodings of this step at which dead codes may start anew
    clocks: Tensor  # (K,), their waiting times, ascending

    def __init__(self, patch: int, codes: int = 512, width: int = 64) -> None:
        super().__init__()
        if patch not in PATCHES:
            raise InputError(
                f"The tokenizer has no patches of {patch} pixels; choose from {', '.join(map(str, PATCHES))}"
            )
        if codes < 2 or width < 1:
            raise InputError(f"A tokenizer needs at least 2 codes and a width of at least 1, not {codes} and {width}")
        self.patch, self.codes = patch, codes
        halvings = int(math.log2(patch)) - 2
        down = [nn.Sequential(_Residual(width), nn.Conv2d(width, width, 4, 2, 1)) for _ in range(halvings)]
        up = [nn.Sequential(nn.ConvTranspose2d(width, width, 4, 2, 1), _Residual(width)) for _ in range(halvings)]
        # Kernels of twice the stride: neighbouring patches overlap, so that no seams are seen between them.
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 8, 4, 2), *down, _Residual(width), _Residual(width), nn.Conv2d(width, CODE_WIDTH, 1)
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(CODE_WIDTH, width, 1),
            _Residual(width),
            _Residual(width),
            *up,
            nn.ConvTranspose2d(width, 3, 8, 4, 2),
        )
        self.register_buffer("codebook", F.normalize(torch.randn(codes, CODE_WIDTH), dim=-1))
        self.register_buffer("sums", self.codebook.clone())
        self.register_buffer("use", torch.zeros(codes))
        # Empty between two steps, so that a checkpoint can do without them.
        self.register_buffer("step_sums", torch.zeros(codes, CODE_WIDTH), persistent=False)
        self.register_buffer("step_use", torch.zeros(codes), persistent=False)
        self.register_buffer("spares", torch.zeros(codes, CODE_WIDTH), persistent=False)
        self.register_buffer("clocks", torch.full((codes,), math.inf), persistent=False)

    def encode(self, images: Tensor) -> Tensor:  # (B, 3, h, w) -> (B, N)
        """Visual token of each patch, row by row."""
        return self.quantize(self.encodings(images))

    def decode(self, tokens: Tensor) -> Tensor:  # (B, N) -> (B, 3, h, w)
        """Images of a square grid of tokens."""
        return self.paint(self.codebook[tokens])

    def encodings(self, images: Tensor) -> Tensor:  # (B, 3, h, w) -> (B, N, d)
        """Unit encodings of the patches."""
        return F.normalize(self.encoder(images).flatten(2).transpose(1, 2).float(), dim=-1)

    def quantize(self, encodings: Tensor) -> Tensor:  # (B, N, d) -> (B, N)
        """Nearest code of each encoding."""
        with torch.autocast(encodings.device.type, enabled=False):  # near ties would be decided by rounding
            return (encodings @ self.codebook.T).argmax(-1)

    def paint(self, codes: Tensor) -> Tensor:  # (B, N, d) -> (B, 3, h, w)
        """Images from a square grid of codes."""
        side = math.isqrt(codes.shape[1])
        result: Tensor = self.decoder(codes.transpose(1, 2).reshape(len(codes), -1, side, side))
        return result

    def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
        """Error of the reconstruction and commitment; `codes` is the perplexity of the tokens of the batch."""
        images = views.pixels[0]
        encodings = self.encodings(images)
        tokens = self.quantize(encodings)
        chosen = self.codebook[tokens]
        straight_through = encodings + (chosen - encodings).detach()
        error = F.mse_loss(self.paint(straight_through).float(), images.float())
        far = (encodings - chosen).square().sum(-1)  # (B, N)
        with torch.no_grad():
            use = total(torch.bincount(tokens.flatten(), minlength=self.codes).float())
            if self.training:
                self._collect(encodings, tokens, use, far, views)
        share = use / use.sum()
        scalars = {"reconstruction": error.detach(), "codes": torch.special.entr(share).sum().exp()}
        return error + COMMITMENT * far.mean(), scalars

    def _collect(self, encodings: Tensor, tokens: Tensor, use: Tensor, far: Tensor, views: Views) -> None:
        """Statistics of all processes for `after_step`; with gradient accumulation those of several batches."""
        flat = encodings.flatten(0, 1)
        self.step_use += use
        self.step_sums += total(torch.zeros_like(self.sums).index_add_(0, tokens.flatten(), flat))
        # The first to ring among clocks with rates w₁, w₂ … are a draw without replacement in proportion to w.
        clocks = -torch.log1p(-views.random(tokens.shape[1])).flatten() / far.flatten().clamp(min=1e-12)
        first = clocks.topk(min(self.codes, len(clocks)), largest=False).indices
        clocks = torch.cat([self.clocks, gather(clocks[first])])
        spares = torch.cat([self.spares, gather(flat[first])])
        # In place, since DDP knows the buffers by the tensors that they were in the beginning.
        first = clocks.topk(self.codes, largest=False).indices
        self.clocks.copy_(clocks[first])
        self.spares.copy_(spares[first])

    @torch.no_grad()
    def after_step(self, progress: Progress) -> None:
        """Codes follow the encodings that chose them; dead codes start anew."""
        self.use.lerp_(self.step_use, 1 - DECAY)
        self.sums.lerp_(self.step_sums, 1 - DECAY)
        mean_use = self.step_use.mean()
        dead = (self.use < DEAD * mean_use).nonzero().squeeze(1)[: int(self.clocks.isfinite().sum())]
        self.use[dead] = mean_use
        self.sums[dead] = mean_use * self.spares[: len(dead)]
        self.codebook.copy_(F.normalize(self.sums, dim=-1))
        self.step_use.zero_()
        self.step_sums.zero_()
        self.clocks.fill_(math.inf)


class _Residual(nn.Module):
    """x + convolutions of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GELU(), nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.body(x)
        return result
