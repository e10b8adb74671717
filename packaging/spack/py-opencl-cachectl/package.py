"""A recipe for Spack. The owner fills in the checksum of the release, the home page and the maintainers."""

from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyOpenclCachectl(PythonPackage):
    """See, clear, switch and prove every kernel cache of the OpenCL stack."""

    pypi = "opencl-cachectl/opencl_cachectl-0.1.0.tar.gz"

    license("MIT")

    version("0.1.0", sha256="0" * 64)

    variant("mpi", default=False, description="Warm the nodes of MPI jobs")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-shtab@1.13:", type=("build", "run"))
    depends_on("py-platformdirs@2.2:", type=("build", "run"))
    depends_on("py-backports-zstd@1:", when="^python@:3.13", type=("build", "run"))
    depends_on("py-tomli@2:", when="^python@:3.10", type=("build", "run"))
    depends_on("py-mpi4py@4:", when="+mpi", type=("build", "run"))
