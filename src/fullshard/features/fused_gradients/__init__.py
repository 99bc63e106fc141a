"""Linear layers whose backward writes the gradients of weights into the reduce buffer.

It may import what `features` may.
It owns the forwards of these layers, and the products of their backward.
"""
