"""Costs without running: the FLOPs and bytes of every operator of a captured step, and their time on a device type.

Operators ──▶ one operator alone ──▶ kernels of F, I and W ──▶ work of the model ──▶ graph with times
              (fake tensors)         FLOPs, bytes                                    (roofline of a device type)
"""
