"""The commands of ``python -m ddp_mp``.  Nothing outside of this folder imports what is in it, but for ``__main__``."""
