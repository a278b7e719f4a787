"""The demonstration of ddp_mp/demo.py: torchrun --standalone --nproc-per-node=2 examples/demo.py"""

import sys

from ddp_mp.demo import main

sys.exit(main(sys.argv[1:]))
