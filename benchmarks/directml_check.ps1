# Checks Ortolan on DirectML (Windows): parity with the CPU, and speed.
#
#   powershell -ExecutionPolicy Bypass -File directml_check.ps1 [-Kit FOLDER] [-Python python.exe]
#
# The same as cuda_check.sh: the kit is a folder that benchmarks/make_check_kit.py made, by default
# the one that this file lies in. Needs Python 3.11 or later; the packages come from the kit's
# wheels, or from the network. It has not been run: nobody who wrote it had such a machine.
param(
    [string]$Kit = $PSScriptRoot,
    [string]$Python = "python",
    [int]$LimitSeconds = 450
)
$ErrorActionPreference = "Stop"

function Fail([string]$Text) {
    [Console]::Error.WriteLine("directml_check: $Text")
    exit 2
}

if (-not (Test-Path "$Kit\bundles") -or -not (Test-Path "$Kit\references")) {
    Fail "$Kit is no kit; make one: python benchmarks/make_check_kit.py KIT BUNDLE"
}

# Prints the packages that this Python lacks, by the names that pip knows.
$Probe = @"
import importlib.util
found = lambda name: importlib.util.find_spec(name) is not None
names = ['numpy', 'tokenizers', 'jinja2', 'click', 'rich', 'ortolan']
names = [name for name in names if not found(name)]
try:
    import onnxruntime
    has = 'DmlExecutionProvider' in onnxruntime.get_available_providers()
except ImportError:
    has = False
print(*names, *[] if has else ['onnxruntime-directml'])
"@
$ProbeFile = New-TemporaryFile
Set-Content -Path $ProbeFile -Value $Probe -Encoding ascii

function Get-Missing {
    $said = & $Python "$ProbeFile"
    if ($LASTEXITCODE -ne 0) { Fail "$Python does not run" }
    return @("$said".Split(" ", [StringSplitOptions]::RemoveEmptyEntries))
}

$Lacks = @(Get-Missing)
if ($Lacks.Count -gt 0) {
    # Into a folder of their own, beside what this Python has already.
    $Target = "$Kit\packages"
    $env:PYTHONPATH = "$Target;$env:PYTHONPATH"
    $Install = @("-m", "pip", "--quiet", "install", "--upgrade", "--target", $Target)
    Write-Host "$Python lacks $Lacks; installing into $Target"
    $Wheels = @(Get-ChildItem "$Kit\wheels\*.whl" -ErrorAction SilentlyContinue)
    if ($Wheels.Count -gt 0) {
        & $Python @Install --no-index --no-deps $Wheels.FullName
    }
    $Lacks = @(Get-Missing)
    if ($Lacks.Count -gt 0) {
        & $Python @Install @Lacks
    }
    $Lacks = @(Get-Missing)
    if ($Lacks.Count -gt 0) { Fail "$Lacks cannot be installed; carry wheels in $Kit\wheels" }
}
Remove-Item $ProbeFile

& $Python "$PSScriptRoot\check_provider.py" $Kit --provider directml `
    --seconds $LimitSeconds --report "$Kit\report.json"
$Status = $LASTEXITCODE
Write-Host "report: $Kit\report.json"
exit $Status
