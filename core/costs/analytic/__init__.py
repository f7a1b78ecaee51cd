"""Costs without a device: what every operator of a captured step computes and moves, and how long a device needs.

Operators ──▶ one operator alone ──▶ kernels of F, I and W ──▶ work of the model ──▶ graph with times
              (fake tensors)         FLOPs, bytes                                    (roofline of a device type)
"""
