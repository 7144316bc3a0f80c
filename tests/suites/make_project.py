"""make -j3 of a C project, again and again; the built program's answer is known."""
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
    f.write("OBJ = " + " ".join(f"part{i}.o" for i in range(N)) + " main.o\nprog: $(OBJ)\n\t$(CC) -o $@ $(OBJ)\n%.o: %.c\n\t$(CC) -O1 -c -o $@ $<\nclean:\n\trm -f prog *.o\n")
while running():
    subprocess.run(["make", "-s", "-C", "project", "clean"], check=True)
    m = subprocess.Popen(["make", "-s", "-j3", "-C", "project"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while m.poll() is None:
        nap(5)
        running()
    out = m.stdout.read()
    check(m.returncode == 0, f"make: {m.returncode} {out}")
    got = subprocess.run(["project/prog"], capture_output=True, text=True).stdout.strip()
    check(got == str(sum(5 * 7 + i for i in range(N))), f"the program printed {got}")
shutil.rmtree("project")
finish()
