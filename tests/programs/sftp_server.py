"""Serve the files of this machine over SFTP to anybody on it who knows the port, which is printed first.

A line for each request goes to the file that the first argument names.
"""

import contextlib
import functools
import os
import socket
import sys
import threading

import paramiko


class Door(paramiko.ServerInterface):
    def check_auth_password(self, username, password):  # noqa: ARG002
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username):  # noqa: ARG002
        return "password"

    def check_channel_request(self, kind, chanid):  # noqa: ARG002
        return paramiko.OPEN_SUCCEEDED


def note(*words):
    if len(sys.argv) > 1:
        with open(sys.argv[1], "a") as file:
            print(*words, file=file)


def answered(method):
    """Return a method whose failures become answers."""

    @functools.wraps(method)
    def call(*arguments):
        try:
            return method(*arguments)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)

    return call


class Files(paramiko.SFTPServerInterface):
    @answered
    def stat(self, path):
        return paramiko.SFTPAttributes.from_stat(os.stat(path))

    lstat = stat

    @answered
    def list_folder(self, path):
        note("list", path)
        listed = []
        with os.scandir(path) as entries:
            for entry in entries:
                # As OpenSSH does, leave out what was renamed meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    listed.append(paramiko.SFTPAttributes.from_stat(entry.stat(follow_symlinks=False), entry.name))
        return listed

    @answered
    def mkdir(self, path, attr):  # noqa: ARG002
        os.mkdir(path)
        return paramiko.SFTP_OK

    @answered
    def open(self, path, flags, attr):  # noqa: ARG002
        note("write" if flags & os.O_WRONLY else "read", path)
        file = os.fdopen(os.open(path, flags, 0o600), "wb" if flags & os.O_WRONLY else "rb")
        handle = paramiko.SFTPHandle(flags)
        handle.readfile = handle.writefile = file
        return handle

    @answered
    def remove(self, path):
        os.remove(path)
        return paramiko.SFTP_OK

    def posix_rename(self, oldpath, newpath):
        os.replace(oldpath, newpath)
        return paramiko.SFTP_OK


def serve(connection):
    # A client may be killed at any moment.
    with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
        transport = paramiko.Transport(connection)
        transport.add_server_key(key)
        transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Files)
        transport.start_server(server=Door())
        transports.append(transport)


key = paramiko.RSAKey.generate(2048)
transports = []
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1])
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()
