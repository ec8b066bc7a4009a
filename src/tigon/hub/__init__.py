"""Export of the portable folders as a kernel repository. Not here yet."""
