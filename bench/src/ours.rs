//! The program `offshoot` running one of its own benchmarks.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::Result;
use crate::kernel::remove_image;

/// Where the program is, and where it makes volumes.
pub(crate) struct Ours {
    /// The program, built with optimisation.
    pub(crate) offshoot: PathBuf,
    /// The image that it makes a volume on.
    pub(crate) image: PathBuf,
}

impl Ours {
    /// Runs `offshoot bench WORKLOAD` with these options on an image that is made anew, and gives what it says.
    pub(crate) fn run(&self, workload: &str, options: &[String]) -> Result<Value> {
        remove_image(&self.image)?;
        let mut command = Command::new(&self.offshoot);
        command.args(["bench", workload, "--json"]).arg(&self.image).args(options);
        let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{command:?} ended with {}\n{said}", output.status));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| format!("{command:?}: {error}"))
    }
}
