"""A CUDA driver without a GPU: runs the PTX of the fat binary that ships, and tells what was wrong with its use."""
