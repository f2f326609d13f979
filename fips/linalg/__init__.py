"""The mathematics: tensors in, tensors out. Nothing here prints, opens a file or changes its arguments."""
