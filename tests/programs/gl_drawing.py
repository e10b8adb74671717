"""Draw a triangle off screen with Mesa's GL, which fills its shader cache; print its renderer, or null, as JSON."""

import ctypes
import json

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int
VERTEX = "attribute vec4 p; void main() { gl_Position = p * 3.0; }"
FRAGMENT = "precision mediump float; void main() { gl_FragColor = vec4(0.5); }"


def numbers(*values):
    return (NUMBER * len(values))(*values)


class Screen:
    """A context of GL ES 2 without a window."""

    def __init__(self):
        self.egl = ctypes.CDLL("libEGL.so.1")
        self.address = self.of_egl("eglGetProcAddress", POINTER, ctypes.c_char_p)
        platform = self.gl("eglGetPlatformDisplayEXT", POINTER, NUMBER, POINTER, POINTER)
        self.display = platform(0x31DD, None, None)
        assert self.of_egl("eglInitialize", NUMBER, POINTER, POINTER, POINTER)(self.display, None, None)
        self.of_egl("eglBindAPI", NUMBER, NUMBER)(0x30A0)
        config, count = POINTER(), NUMBER()
        choose = self.of_egl("eglChooseConfig", NUMBER, POINTER, POINTER, POINTER, NUMBER, POINTER)
        wanted = numbers(0x3033, 1, 0x3040, 4, 0x3038)
        assert choose(self.display, wanted, ctypes.byref(config), 1, ctypes.byref(count))
        create = self.of_egl("eglCreateContext", POINTER, POINTER, POINTER, POINTER, POINTER)
        self.context = create(self.display, config, None, numbers(0x3098, 2, 0x3038))
        assert self.context
        self.make_current = self.of_egl("eglMakeCurrent", NUMBER, POINTER, POINTER, POINTER, POINTER)
        assert self.make_current(self.display, None, None, self.context)

    def of_egl(self, name, result, *arguments):
        function = getattr(self.egl, name)
        function.restype, function.argtypes = result, arguments
        return function

    def gl(self, name, result, *arguments):
        return ctypes.CFUNCTYPE(result, *arguments)(self.address(name.encode()))

    def shader(self, program, kind, source):
        shader = self.gl("glCreateShader", NUMBER, NUMBER)(kind)
        text = ctypes.c_char_p(source.encode())
        self.gl("glShaderSource", None, NUMBER, NUMBER, POINTER, POINTER)(shader, 1, ctypes.byref(text), None)
        self.gl("glCompileShader", None, NUMBER)(shader)
        self.gl("glAttachShader", None, NUMBER, NUMBER)(program, shader)

    def draw(self):
        frame, buffer = NUMBER(), NUMBER()
        self.gl("glGenFramebuffers", None, NUMBER, POINTER)(1, ctypes.byref(frame))
        self.gl("glBindFramebuffer", None, NUMBER, NUMBER)(0x8D40, frame.value)
        self.gl("glGenRenderbuffers", None, NUMBER, POINTER)(1, ctypes.byref(buffer))
        self.gl("glBindRenderbuffer", None, NUMBER, NUMBER)(0x8D41, buffer.value)
        self.gl("glRenderbufferStorage", None, NUMBER, NUMBER, NUMBER, NUMBER)(0x8D41, 0x8058, 16, 16)
        attach = self.gl("glFramebufferRenderbuffer", None, NUMBER, NUMBER, NUMBER, NUMBER)
        attach(0x8D40, 0x8CE0, 0x8D41, buffer.value)
        program = self.gl("glCreateProgram", NUMBER)()
        self.shader(program, 0x8B31, VERTEX)
        self.shader(program, 0x8B30, FRAGMENT)
        self.gl("glLinkProgram", None, NUMBER)(program)
        self.gl("glUseProgram", None, NUMBER)(program)
        points = (ctypes.c_float * 12)(-1, -1, 0, 1, 1, -1, 0, 1, 0, 1, 0, 1)
        vertices = self.gl("glVertexAttribPointer", None, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, POINTER)
        vertices(0, 4, 0x1406, 0, 0, ctypes.cast(points, POINTER))
        self.gl("glEnableVertexAttribArray", None, NUMBER)(0)
        self.gl("glDrawArrays", None, NUMBER, NUMBER, NUMBER)(4, 0, 3)
        self.gl("glFinish", None)()

    def close(self):
        self.make_current(self.display, None, None, None)
        self.of_egl("eglDestroyContext", NUMBER, POINTER, POINTER)(self.display, self.context)
        self.of_egl("eglTerminate", NUMBER, POINTER)(self.display)


if __name__ == "__main__":
    renderer = None
    try:
        screen = Screen()
        renderer = ctypes.string_at(screen.gl("glGetString", POINTER, NUMBER)(0x1F01)).decode()
        screen.draw()
        screen.close()
    except (OSError, AttributeError, TypeError, AssertionError):
        pass
    print(json.dumps({"renderer": renderer}))
