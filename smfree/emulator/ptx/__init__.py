"""PTX as a program: text to syntax tree (parser), rules of the assembler (check), control flow and liveness (flow)."""
