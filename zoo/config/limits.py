"""Upper limits and choices of values from files and callers.

The limits are far beyond any use and below what would overflow or hang.
"""

from __future__ import annotations

import math
from typing import Literal

# Pixels of an image, decoded or resized: 256 MiB as RGB. PIL warns above this limit and fails above twice this limit.
MAX_PIXELS = 2**28 // 3
MAX_SIDE = math.isqrt(MAX_PIXELS)
MAX_IMAGE_BYTES = 2**30  # size of an image file; files may be uncompressed, with 16 bits per value
MAX_CLASSES = 100_000  # limit for experiments, networks and weights files; ImageNet-21k has 21,841
MAX_BATCH = 10_000_000  # ImageNet has 1.3 million training images
MAX_REPLICAS = 1024
MAX_EPOCHS = 1_000_000
MAX_STEPS = 10**9
MAX_RATE = 1e6  # limit for learning rates, weight decay and gains
MAX_SLOPE = 1e3  # slope of leaky_relu, alpha of elu

# Sizes of networks.
MAX_DILATION = 1024
MAX_BLOCKS = 1000  # blocks per level; the deepest published i-RevNet has 300 in total
MAX_CHANNELS = 4096
MAX_LEVELS = 8
MAX_GRID_BITS = 22  # leaves float32 a range of 4

# How validation images are resized and cropped.
Interpolation = Literal["bilinear", "bicubic"]
CropMode = Literal["center", "squash"]
