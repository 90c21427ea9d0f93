"""What is here only for speed; tests hold each equal to what plain PyTorch computes.

gradients.py (no autograd for small networks), optimiser.py (Adam over one vector), acting.py with
_act.c (a forward pass and a draw in one call of C).
"""
