//! Targets of symbolic links. A short one is the plain bytes of the data fork; another lies in
//! blocks of [`RemoteKind::SymlinkTarget`]: one part an extent.
//!
//! [`RemoteKind::SymlinkTarget`]: crate::remote::RemoteKind::SymlinkTarget

use crate::{Malformed, Structure};

/// The longest target, in bytes.
pub const MAX_LEN: usize = 1024;

/// Proves a whole target: 1 to 1,024 bytes without NUL.
pub fn check(target: &[u8]) -> Result<(), Malformed> {
    if target.is_empty() || target.len() > MAX_LEN {
        let problem = format!("a target of {} bytes", target.len());
        return Err(Malformed::new(Structure::SymlinkBlock, problem));
    }
    if target.contains(&0) {
        return Err(Malformed::new(Structure::SymlinkBlock, "its target holds a NUL byte"));
    }
    Ok(())
}
