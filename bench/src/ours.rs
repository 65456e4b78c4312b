//! The program `offshoot` as a side of the seed workloads: it runs one of its own benchmarks.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::Result;
use crate::kernel::remove_image;

/// The paths of the program and of its volume.
pub(crate) struct ProgramPaths {
    /// The program, built with optimisation.
    pub(crate) offshoot: PathBuf,
    /// The image that it makes a volume on.
    pub(crate) image: PathBuf,
}

impl ProgramPaths {
    /// Runs `offshoot bench WORKLOAD` with these options on a new image, and returns its JSON. If
    /// `under` is not empty, that command starts the program.
    pub(crate) fn run(&self, under: &[&str], workload: &str, options: &[String]) -> Result<Value> {
        remove_image(&self.image)?;
        let mut words = under.iter().map(OsStr::new).chain([self.offshoot.as_os_str()]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).args(["bench", workload, "--json"]).arg(&self.image).args(options);
        let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{command:?} ended with {}\n{said}", output.status));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| format!("{command:?}: {error}"))
    }
}
