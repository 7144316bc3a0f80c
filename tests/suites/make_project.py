"""make -j3 of a C project, again and again; the built program's answer is known.

A crash leaves files that were made after the checkpoint as they are: complete, half written, or gone. make takes a half-written object for a finished
one, with or without Belay, so the rules give a file its final name only when it is complete, with a link, which can be made twice; and -pipe
spares temporary files (docs/limits.md).
"""
import os
import shutil
import subprocess

from belay_rounds import check, finish, nap, running

N = 12
os.makedirs("project", exist_ok=True)
for i in range(N):
    with open(f"project/part{i}.c", "w") as f:
        f.write("#include <stdio.h>\n#include <string.h>\n" + "".join(f"int f{i}_{k}(int x) {{ return x * {k} + {i}; }}\n" for k in range(60)))
with open("project/main.c", "w") as f:
    f.write("#include <stdio.h>\n" + "".join(f"int f{i}_7(int);\n" for i in range(N)) + "int main(void) { long s = 0;" + "".join(f" s += f{i}_7(5);" for i in range(N)) + ' printf("%ld\\n", s); return 0; }\n')
with open("project/Makefile", "w") as f:
    f.write("OBJ = " + " ".join(f"part{i}.$(R).o" for i in range(N)) + " main.$(R).o\nprog.$(R): $(OBJ)\n\t$(CC) -o $@.part $(OBJ) && ln -f $@.part $@\n%.$(R).o: %.c\n\t$(CC) -pipe -O1 -c -o $@.part $< && ln -f $@.part $@\n")
number = 0
while running():
    number += 1
    m = subprocess.Popen(["make", "-s", "-j3", "-C", "project", f"R={number}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while m.poll() is None:
        nap(5)
        running()
    out = m.stdout.read()
    check(m.returncode == 0, f"make: {m.returncode} {out}")
    got = subprocess.run([f"project/prog.{number}"], capture_output=True, text=True).stdout.strip()
    check(got == str(sum(5 * 7 + i for i in range(N))), f"the program printed {got}")
shutil.rmtree("project")
finish()
