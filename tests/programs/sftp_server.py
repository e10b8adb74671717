"""Serve the files of this machine over SFTP to anybody on it who knows the port, which is printed first."""

import os
import socket
import sys

import paramiko


class Door(paramiko.ServerInterface):
    """Let anybody in."""

    def check_auth_password(self, username, password):  # noqa: ARG002
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username):  # noqa: ARG002
        return "password"

    def check_channel_request(self, kind, chanid):  # noqa: ARG002
        return paramiko.OPEN_SUCCEEDED


class Files(paramiko.SFTPServerInterface):
    """The files as they are."""

    def stat(self, path):
        try:
            return paramiko.SFTPAttributes.from_stat(os.stat(path))
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)

    lstat = stat

    def open(self, path, flags, attr):  # noqa: ARG002
        try:
            file = os.fdopen(os.open(path, flags, 0o600), "wb" if flags & os.O_WRONLY else "rb")
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)
        handle = paramiko.SFTPHandle(flags)
        handle.readfile = handle.writefile = file
        return handle

    def remove(self, path):
        os.remove(path)
        return paramiko.SFTP_OK

    def posix_rename(self, oldpath, newpath):
        os.replace(oldpath, newpath)
        return paramiko.SFTP_OK


key = paramiko.RSAKey.generate(2048)
transports = []
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1])
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        transport = paramiko.Transport(connection)
        transport.add_server_key(key)
        transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Files)
        transport.start_server(server=Door())
        transports.append(transport)
