"""The demonstration of ddp_mp/tools/demo.py: torchrun --standalone --nproc-per-node=2 examples/demo.py"""

import sys

from ddp_mp.tools.demo import main

sys.exit(main(sys.argv[1:]))
