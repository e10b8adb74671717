"""Draw a triangle off screen with Mesa's GL, which fills its shader cache; print its renderer, or null, as JSON."""

import ctypes
import json
from ctypes import byref

POINTER = ctypes.c_void_p
VERTEX = b"attribute vec4 p; void main() { gl_Position = p * 3.0; }"
FRAGMENT = b"precision mediump float; void main() { gl_FragColor = vec4(0.5); }"


def call(name, *arguments, result=ctypes.c_int):
    """Call a function of EGL or GL; other numbers than pointers are C's int."""
    return ctypes.CFUNCTYPE(result)(address_of(name.encode()))(*arguments)


def pointer(name, *arguments):
    return POINTER(call(name, *arguments, result=POINTER))


def numbers(*values):
    return (ctypes.c_int * len(values))(*values)


def draw():
    """Draw in a context of GL ES 2 without a window, and return the renderer."""
    display = pointer("eglGetPlatformDisplayEXT", 0x31DD, None, None)
    assert call("eglInitialize", display, None, None)
    call("eglBindAPI", 0x30A0)
    config, count, frame, buffer = POINTER(), numbers(0), numbers(0), numbers(0)
    assert call("eglChooseConfig", display, numbers(0x3033, 1, 0x3040, 4, 0x3038), byref(config), 1, count)
    context = pointer("eglCreateContext", display, config, None, numbers(0x3098, 2, 0x3038))
    assert call("eglMakeCurrent", display, None, None, context)
    call("glGenFramebuffers", 1, frame)
    call("glBindFramebuffer", 0x8D40, frame[0])
    call("glGenRenderbuffers", 1, buffer)
    call("glBindRenderbuffer", 0x8D41, buffer[0])
    call("glRenderbufferStorage", 0x8D41, 0x8058, 16, 16)
    call("glFramebufferRenderbuffer", 0x8D40, 0x8CE0, 0x8D41, buffer[0])
    program = call("glCreateProgram")
    for kind, source in ((0x8B31, VERTEX), (0x8B30, FRAGMENT)):
        shader = call("glCreateShader", kind)
        call("glShaderSource", shader, 1, byref(ctypes.c_char_p(source)), None)
        call("glCompileShader", shader)
        call("glAttachShader", program, shader)
    call("glLinkProgram", program)
    call("glUseProgram", program)
    points = (ctypes.c_float * 12)(-1, -1, 0, 1, 1, -1, 0, 1, 0, 1, 0, 1)
    call("glVertexAttribPointer", 0, 4, 0x1406, 0, 0, points)
    call("glEnableVertexAttribArray", 0)
    call("glDrawArrays", 4, 0, 3)
    call("glFinish")
    renderer = ctypes.string_at(call("glGetString", 0x1F01, result=POINTER)).decode()
    call("eglMakeCurrent", display, None, None, None)
    call("eglDestroyContext", display, context)
    call("eglTerminate", display)
    return renderer


if __name__ == "__main__":
    renderer = None
    try:
        address_of = ctypes.CDLL("libEGL.so.1").eglGetProcAddress
        address_of.restype = POINTER
        renderer = draw()
    except (OSError, TypeError, AssertionError):
        pass
    print(json.dumps({"renderer": renderer}))
