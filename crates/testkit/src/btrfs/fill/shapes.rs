//! Shapes of files, plain and compressed by each method.

use std::path::Path;

use super::data::{set_compression, set_nocow};
use super::{METHODS, directory};
use crate::fill::shapes::{clones, overwritten, preallocated, unshared};

/// Makes all families of shapes, plain and compressed by every method.
pub fn fill(dir: &Path) {
    fill_by(dir, &METHODS);
}

/// Makes all families of shapes, plain and compressed by these methods.
pub fn fill_by(dir: &Path, methods: &[&str]) {
    for method in ["plain"].iter().chain(methods) {
        let dir = directory(dir, method);
        if *method != "plain" {
            set_compression(&dir, method);
        }
        unshared(&dir);
        clones(&dir);
    }
    let nocow = directory(dir, "nocow");
    set_nocow(&nocow);
    overwritten(&nocow);
    preallocated(&nocow);
}
