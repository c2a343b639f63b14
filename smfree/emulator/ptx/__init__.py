"""PTX as a program: syntax tree, parser, assembler rules (check), control flow and liveness (flow)."""
