# One line a file, link or directory of the rank's own disk: kind, mode, owner, and what changes with content. What systemd, sshd,
# Ansible's own temporary files and Python's byte code may touch at any time is left out.
find / -xdev \( -path /tmp -o -path /var/tmp -o -path /var/log -o -path /var/lib/systemd -o -path /root/.ansible -o -name __pycache__ \) -prune \
  -o -type d -printf '%p\t%y %m %u\n' -o -printf '%p\t%y %m %u %s %T@ %l\n'
